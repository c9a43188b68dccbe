"""The agent is ours; the environment that it gives to ranks is torchrun's (tests/ranks compares it with a real one)."""

from dure.launch.agent import rank_environment
from dure.launch.nodes.messages import Team


def test_the_second_rank_of_the_second_node_finds_its_place_in_torchruns_variables(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    team = Team(
        number=3,
        node=1,
        nodes=2,
        first_rank=4,
        local_ranks=2,
        ranks=6,
        leader="10.0.1.10",
        store_port=29400,
        restarts=2,
    )
    assert rank_environment(team, local_rank=1, run_id="cats", max_restarts=3) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "5",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.1.10",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "cats",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
