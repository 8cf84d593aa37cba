"""The generation server: an HTTP process without torch, and the service on the ranks that generate.

The way of a request, hop by hop:

1. a route of `app.py`, whose handler (`completions.py`) makes a `Generate` for each response of what the
   schema has checked;
2. `ReplicaPool` (`replica_pool.py`), which queues them and chooses a replica;
3. `Link` (`links.py`) from the HTTP process to the replica's leader, who tells the other ranks (`frontend_process.py`);
4. `ReplicaService` (`replica_service.py`), which makes a `GenerationRequest` of it for the engine (`served_engine.py`).

What the ranks answer comes back on the same link as `RequestUpdate`s of the handler's `Submission`.
"""
