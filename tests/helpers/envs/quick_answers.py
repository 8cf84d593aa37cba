"""Answers at once, in place of a verifier: `python -m tests.helpers.envs.quick_answers FD DOOR NAME`."""

from megarl.confine import children


class Lengths:
    """The `children.Answers`: how long a text is."""

    max_result = 1 << 16

    def warm_up(self):
        pass

    def work(self, item: dict) -> dict:
        return {"length": len(item["text"])}

    def checked(self, result: dict) -> dict:
        return result

    def answer(self, request: dict, within: children.Children) -> dict:
        return within.in_own_child(request, 60.0)


if __name__ == "__main__":
    children.main(lambda name: Lengths())
