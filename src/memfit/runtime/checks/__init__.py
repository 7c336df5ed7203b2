"""What a plan was made for, compared with what a forward pass of its model meets."""
