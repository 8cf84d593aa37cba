"""Episodes as a packed batch: what the policy has chosen, what a thinking budget has, and where rewards are."""

from typing import NamedTuple

import torch

from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.roles.scored import turns_of
from megarl.rollout.episodes.episode import EnvironmentResult, Episode, EpisodeLimits
from megarl.rollout.episodes.results import episodes_to_batch
from megarl.rollout.replica_batch import forced_responses
from tests.helpers.texts.character_tokenizer import CharacterTokenizer


class _Rule(NamedTuple):
    """Forces two tokens after three of a turn that follows an even token."""

    limit = 3

    def forced(self, prompt, response):
        return range(3, 5) if len(response) >= 3 and prompt[-1] % 2 == 0 else range(0)


def test_forced_tokens_of_turns_are_not_the_policys_but_within_their_turns():
    """The third turn is cut within its forced tokens: then its reward is at the last token before them."""
    limits = EpisodeLimits(turns=9, turn=9, response=60, thinking=_Rule())
    episode = Episode(0, GenerationRequest([1, 2], 7, 0), line=3, limits=limits, key="1/3/0")
    episode.apply(EnvironmentResult(0, [1, 2, 4]))
    for turn, tokens in enumerate(([10, 11, 12, 0, 0, 13], [20, 21, 22, 23], [30, 31, 32, 0])):
        assert episode.next_request().start == len(episode.tokens)
        episode.add_turn(Completion(tokens, [-1.0] * len(tokens), finished=True))
        episode.apply(EnvironmentResult(0, [51 - turn % 2] if turn < 2 else [], 0.5 + turn, done=turn == 2))
    # Prompt, turn, observation 51, turn, observation 50, turn.
    forced = [0] * 3 + [0, 0, 0, 1, 1, 0] + [0] + [0] * 4 + [0] + [0, 0, 0, 1]
    chosen = [0] * 3 + [1, 1, 1, 0, 0, 1] + [0] + [1] * 4 + [0] + [1, 1, 1, 0]
    batch = episodes_to_batch([episode], has_forced=True)
    assert batch.forced.int().tolist() == forced and batch.response_mask.int().tolist() == chosen
    assert batch.turn_rewards.nonzero().flatten().tolist() == [8, 13, 17]
    turns = turns_of(batch, CharacterTokenizer())[0]
    assert [turn["reward"] for turn in turns] == [0.5, 1.5, 2.5] and len(turns[0]["text"]) == 4  # 0 has no text
    assert forced_responses(batch) == 1


def test_tokens_of_earlier_rounds_keep_their_versions():
    """Of an episode that has failed and lost its turns, those of its prompt."""
    episodes = []
    for number, known in enumerate(([(0, [3, 3, 4])], [(1, [2, 2]), (3, [5])], [(0, [3, 3, 4, 4, 4]), (0, [1])], [])):
        episode = Episode(number, GenerationRequest([1], 7, 0), line=3, limits=EpisodeLimits(1, 1, 1))
        episode.tokens, episode.prompt_length, episode.known_versions = [1, 2, 3, 4], 1, known
        episodes.append(episode)
    batch = episodes_to_batch(reversed(episodes), version=7)
    rows = [row.tolist() for row in batch.versions.split(batch.lengths.tolist())]
    assert rows == [[3, 3, 4, 7], [7, 2, 2, 5], [1, 7, 7, 7], [7] * 4] and batch.versions.dtype == torch.int32
    assert episodes_to_batch(episodes).versions is None
