"""Where the record of an instance and the reports of its hosts live: in a supervisor, or in etcd."""
