"""Multi-turn rollouts: episodes of turns that the engine generates and observations that environments answer with.

A continuation is a request with the same random stream and a longer prompt: the last prompt, the tokens as they were
written, and the template's text between two turns. Nothing that the policy wrote is encoded again, and no text depends
on when an environment answers.
"""
