"""The link between host memory and the device: copies, their order, and the log of transfers."""
