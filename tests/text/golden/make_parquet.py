# Writes texts.parquet beside it, for tests/integration/corpus_build.sh. Needs pyarrow.
import pathlib

import pyarrow
import pyarrow.parquet

texts = ["first", "ü and 中", None, "first", "", "last\n", "x" * 300]
table = pyarrow.table({"id": range(len(texts)), "text": texts, "n": [{"t": t} for t in texts]})
pyarrow.parquet.write_table(
    table, pathlib.Path(__file__).parent / "texts.parquet", row_group_size=3, compression="zstd",
    write_statistics=False, store_schema=False)
