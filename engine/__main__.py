"""`python -P -m tieredkv.engine FD` is the engine's process."""

import gc

if __name__ == "__main__":
    gc.disable()  # what is imported stays; looking for garbage in it takes a fifth of the time
    from tieredkv.engine.engine_process import main

    gc.freeze()
    gc.enable()
    main()
