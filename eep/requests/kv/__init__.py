"""The context of requests, kept so that another rank can go on from it."""
