"""`python -m tinyserve`: three requests ask for two blocks each, of a pool of four."""

import tinyserve

if __name__ == "__main__":
    tinyserve.load_plugins()
    from tinyserve.pool import BlockPool

    pool = BlockPool(num_blocks=4)
    granted = [pool.allocate(2) is not None for _ in range(3)]
    print(f"granted {granted.count(True)} of {len(granted)} requests, blocks in use: {pool.used} of {pool.num_blocks}")
