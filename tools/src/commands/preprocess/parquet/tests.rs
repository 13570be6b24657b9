//! Tests with files that pyarrow wrote (`tools/tests/fixtures/parquet/make.py`), intact and
//! damaged.

use super::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/parquet")
        .join(format!("{name}.parquet"))
}

/// Rows of `text` and `title`, as in `make.py`.
fn expected(n: usize) -> Vec<Vec<Vec<String>>> {
    let text = |i: usize| (i % 11 != 5).then(|| format!("row {i} {}", "wörd ".repeat(i % 7)));
    (0..n)
        .map(|i| vec![Vec::from_iter(text(i)), vec![["a", "bb", ""][i % 3].to_string()]])
        .collect()
}

fn read(path: &Path, keys: &[&str]) -> Result<Vec<Vec<Vec<String>>>, String> {
    let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
    let mut rows = Rows::open(path, &keys).map_err(|error| error.to_string())?;
    // Damaged files can claim any number of rows.
    std::iter::from_fn(|| rows.read().transpose())
        .take(5000)
        .collect::<Result<_, _>>()
        .map_err(|e| e.to_string())
}

#[test]
fn codecs_encodings_and_kinds_of_pages_give_the_same_rows() {
    for name in
        ["snappy", "snappy-v2", "gzip-large", "zstd-binary", "lz4-delta-length", "zstd-delta"]
    {
        let found =
            read(&fixture(name), &["text", "title"]).unwrap_or_else(|error| panic!("{error}"));
        assert!(found == expected(300), "{name}");
    }
    assert_eq!(read(&fixture("plain"), &["text", "title"]).unwrap(), expected(7));
    let titles: Vec<_> = expected(300).into_iter().map(|mut row| vec![row.remove(1)]).collect();
    assert_eq!(read(&fixture("snappy"), &["title"]).unwrap(), titles);
}

#[test]
fn groups_without_rows_are_passed_over() {
    assert_eq!(read(&fixture("empty-groups"), &["text", "title"]).unwrap(), expected(3));
    assert_eq!(read(&fixture("no-rows"), &["text", "title"]).unwrap(), expected(0));
}

#[test]
fn what_is_no_text_is_refused_by_name() {
    for (name, key, parts) in [
        (
            "plain",
            "meta",
            &["plain.parquet", "column \"meta\" holds lists or structures", "--json-keys"][..],
        ),
        ("plain", "id", &["column \"id\" holds i64"]),
        ("plain", "url", &["no column \"url\"", "id, meta, title, text"]),
        ("brotli", "text", &["column \"text\", row 1", "Brotli", "zstd"]),
    ] {
        let message = read(&fixture(name), &[key]).unwrap_err();
        assert!(
            parts.iter().all(|part| message.contains(part)),
            "{message} lacks one of {parts:?}"
        );
    }
}

/// For any change, the result is an error that names the file, or the original number of rows.
#[test]
fn damaged_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.parquet");
    let mut errors = 0;
    for name in ["plain", "zstd-delta", "lz4-delta-length", "snappy-v2"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        let rows = read(&fixture(name), &["text", "title"]).unwrap().len();
        for at in (0..whole.len()).step_by(1 + whole.len() / 600) {
            for change in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                std::fs::write(&path, bytes).unwrap();
                match read(&path, &["text", "title"]) {
                    Ok(found) => assert_eq!(found.len(), rows, "{name}, byte {at} ^ {change}"),
                    Err(message) => {
                        assert!(message.contains("damaged.parquet"), "{message}");
                        errors += 1;
                    }
                }
            }
        }
        for len in (0..whole.len()).step_by(1 + whole.len() / 300) {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(read(&path, &["text"]).is_err());
        }
    }
    assert!(errors > 500, "{errors}");
}

#[test]
fn a_changed_page_with_a_checksum_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.parquet");
    let mut bytes = std::fs::read(fixture("zstd-binary")).unwrap();
    let rows = read(&fixture("zstd-binary"), &["text"]).unwrap();
    let mut noticed = 0;
    for at in (4..bytes.len() / 2).step_by(97) {
        bytes[at] ^= 4;
        std::fs::write(&path, &bytes).unwrap();
        match read(&path, &["text"]) {
            Ok(found) => assert!(found == rows, "byte {at}"), // of another column
            Err(message) => noticed += usize::from(message.contains("checksum")),
        }
        bytes[at] ^= 4;
    }
    assert!(noticed > 10, "{noticed}");
}

/// A page of a few bytes that claims 200 MB, in every codec.
#[test]
fn sizes_that_cannot_be_are_refused_before_memory_is_taken() {
    for codec in [0, 1, 2, 6, 7] {
        assert!(decompress(codec, vec![1; 20], 200 << 20).is_err(), "{codec}");
    }
    // snappy: 20 bytes that claim 2^32 − 1
    assert!(decompress(1, vec![0xff, 0xff, 0xff, 0xff, 0x0f, 0, 0], 100).is_err());
    // A page header: kind 0, 2^30 bytes.
    let header = [0x15, 0, 0x15, 0x80, 0x80, 0x80, 0x80, 8, 0];
    assert!(PageHeader::read(&header).unwrap_err().contains("more than 256 MiB"));
}
