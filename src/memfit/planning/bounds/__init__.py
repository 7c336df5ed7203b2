"""Lower bounds on the overhead and on the peak of every plan."""
