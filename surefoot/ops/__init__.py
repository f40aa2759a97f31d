"""Operations that blocks are made of: for each a plain reference (`…_plain`) and the path that runs."""
