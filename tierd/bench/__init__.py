"""What `tierd bench` measures, and its tables; the README says which module is whose."""
