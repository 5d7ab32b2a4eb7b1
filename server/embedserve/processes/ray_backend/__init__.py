"""`embedserve cluster --backend ray`: Ray places the shards of a cluster, and starts them again.

Ray carries no lookup. A process of its own connects to Ray, because such a process ends when Ray's
control plane (GCS) is lost for a minute: `placement` for the command, `address_follower` for other
routers. Both write the file of addresses that a router reads, so a router never imports ray.
"""
