"""The generation server: an HTTP process without torch, and the service on the ranks that generate.

The way of a request, hop by hop:

1. a route of `app.py`, whose handler (`completions.py`, `chat.py`, `generate.py`) makes messages for the leaders;
2. `ReplicaPool` (`replica_pool.py`), which queues them and chooses a replica (`routing.py`);
3. `Link` (`links.py`) from the HTTP process to the replica's leader, who tells the other ranks (`frontend_process.py`);
4. `ReplicaService` (`replica_service.py`), which gives them to the engine (`served_engine.py`) or to `scoring.py`.

What the ranks answer comes back as `RequestUpdate`s of the handler's `Submission` (`submission.py`).
"""
