"""The one node of a local cluster: a kubelet whose containers are local processes."""
