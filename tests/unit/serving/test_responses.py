"""The schemas of the answers."""


def test_the_schema_declares_all_errors(server):
    schema = server.client.get("/openapi.json").json()
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"400", "401", "404", "405", "413", "415", "429", "500", "503"} < set(operation["responses"])
            assert "422" not in operation["responses"]
    assert "ValidationError" not in schema["components"]["schemas"]
