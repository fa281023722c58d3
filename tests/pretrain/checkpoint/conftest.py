import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    with RankPool(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
