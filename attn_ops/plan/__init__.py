"""Plan state: the tensors that hold the schedule of a batch, their sizes, and the page tables they are made from."""
