"""The context of requests on this rank, and what it takes over of a lost one."""
