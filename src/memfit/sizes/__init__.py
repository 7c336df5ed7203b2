"""Plans for batches of any size: learns which sizes vary, describes the step at each, plans for some of them."""
