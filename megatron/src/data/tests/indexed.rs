//! Tests of indexed datasets: bytes, round trips, and files with false contents.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Random, dataset, names, write};
use crate::Error;
use crate::data::{IndexedDataset, IndexedWriter, TokenType};

/// Two documents of u16 tokens, as Megatron 0.16.1 stores them: \[\[1, 2, 3\], \[4\]\],
/// \[\[300\]\].
const IDX: &[u8] = &[
    b'M', b'M', b'I', b'D', b'I', b'D', b'X', 0, 0, // magic
    1, 0, 0, 0, 0, 0, 0, 0, // version
    8, // u16
    3, 0, 0, 0, 0, 0, 0, 0, // sequences
    3, 0, 0, 0, 0, 0, 0, 0, // document entries
    3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, // lengths
    0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, // byte offsets
    0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0,
    0, // document boundaries
];
const BIN: &[u8] = &[1, 0, 2, 0, 3, 0, 4, 0, 44, 1];

fn documents() -> Vec<Vec<Vec<u32>>> {
    vec![vec![vec![1, 2, 3], vec![4]], vec![vec![300]]]
}

fn pair(folder: &Path, bin: &[u8], idx: &[u8]) -> PathBuf {
    write(folder, "x.bin", bin);
    write(folder, "x.idx", idx);
    folder.join("x")
}

fn message(prefix: &Path) -> String {
    match IndexedDataset::open(prefix) {
        Err(error @ Error::Data { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut idx = IDX.to_vec();
    idx[at..at + bytes.len()].copy_from_slice(bytes);
    idx
}

#[test]
fn the_bytes_written_are_megatrons() {
    let folder = tempfile::tempdir().unwrap();
    dataset(&folder.path().join("x"), TokenType::U16, &documents());
    assert_eq!(fs::read(folder.path().join("x.idx")).unwrap(), IDX);
    assert_eq!(fs::read(folder.path().join("x.bin")).unwrap(), BIN);
    assert_eq!(names(folder.path()), ["x.bin", "x.idx"]);
}

#[test]
fn a_dataset_of_megatrons_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = IndexedDataset::open(pair(folder.path(), BIN, IDX)).unwrap();
    assert_eq!((dataset.num_documents(), dataset.num_sequences(), dataset.num_tokens()), (2, 3, 5));
    let sequences: Vec<_> = (0..3).map(|i| dataset.read_sequence(i).unwrap()).collect();
    assert_eq!(sequences, documents().concat());
    let starts: Vec<_> = (0..=2).map(|i| dataset.document_start(i).unwrap()).collect();
    assert_eq!(starts, [0, 2, 3]);
}

#[test]
fn every_type_gives_its_tokens_back() {
    let folder = tempfile::tempdir().unwrap();
    for token_type in [
        TokenType::U8,
        TokenType::I8,
        TokenType::I16,
        TokenType::I32,
        TokenType::I64,
        TokenType::U16,
    ] {
        let tokens = vec![0, 1, 127, token_type.max()];
        let dataset = dataset(&folder.path().join("x"), token_type, &[vec![tokens.clone()]]);
        assert_eq!((dataset.token_type(), dataset.read_sequence(0).unwrap()), (token_type, tokens));
    }
}

#[test]
fn tokens_are_u16_below_a_vocabulary_of_65500() {
    assert_eq!(TokenType::for_vocabulary(65_499), TokenType::U16);
    assert_eq!(TokenType::for_vocabulary(65_500), TokenType::I32);
}

#[test]
fn empty_documents_and_sequences_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let documents = vec![vec![], vec![vec![], vec![7]], vec![]];
    let dataset = dataset(&folder.path().join("x"), TokenType::U16, &documents);
    assert_eq!((dataset.num_documents(), dataset.num_sequences(), dataset.num_tokens()), (3, 2, 1));
    assert!(dataset.read_sequence(0).unwrap().is_empty());
}

#[test]
fn a_writer_given_up_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(folder.path().join("x"), TokenType::U16).unwrap();
    writer.add_sequence(&[1, 2, 3]).unwrap();
    drop(writer);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn a_token_that_does_not_fit_its_type_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(folder.path().join("x"), TokenType::U16).unwrap();
    let message = writer.add_sequence(&[65_536]).unwrap_err().to_string();
    assert!(message.contains("65536") && message.contains("U16"), "{message}");
}

#[test]
fn half_a_pair_is_an_error_that_names_the_other_half() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = pair(folder.path(), BIN, IDX);
    fs::remove_file(folder.path().join("x.bin")).unwrap();
    assert!(
        message(&prefix).contains("x.bin: does not exist") && message(&prefix).contains("x.idx")
    );
    fs::rename(folder.path().join("x.idx"), folder.path().join("x.bin")).unwrap();
    assert!(message(&prefix).contains("x.idx: does not exist"));
}

#[test]
fn an_index_cut_anywhere_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for length in 0..IDX.len() {
        let message = message(&pair(folder.path(), BIN, &IDX[..length]));
        assert!(
            message.contains("x.idx")
                && (message.contains("truncated") || message.contains("empty")),
            "{message}"
        );
    }
}

#[test]
fn tokens_cut_anywhere_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for length in 0..BIN.len() {
        let message = message(&pair(folder.path(), &BIN[..length], IDX));
        assert!(
            message.contains("x.bin")
                && (message.contains("truncated") || message.contains("empty")),
            "{message}"
        );
    }
}

#[test]
fn an_index_that_contradicts_itself_or_the_tokens_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let huge = u64::MAX.to_le_bytes();
    for (what, idx, bin) in [
        ("does not begin with MMIDIDX", with(0, b"X"), BIN),
        ("version 2", with(9, &[2]), BIN),
        ("type 7", with(17, &[7]), BIN),
        ("claims 18446744073709551615 sequences", with(18, &huge), BIN),
        ("3 sequences and 18446744073709551615 document entries", with(26, &huge), BIN),
        ("need 106", with(18, &[4]), BIN),
        ("length -1", with(34, &[255, 255, 255, 255]), BIN),
        ("at byte -1", with(46, &huge), BIN),
        ("truncated", with(38, &[200]), BIN),
        ("describes 10", IDX.to_vec(), &[1; 12]),
        ("boundary 0 is sequence 1", with(70, &[1]), BIN),
        ("boundary 1 is sequence 9", with(78, &[9]), BIN),
        ("the last document ends at sequence 2", with(86, &[2]), BIN),
    ] {
        let message = message(&pair(folder.path(), bin, &idx));
        assert!(message.contains(what), "{message} lacks {what}");
    }
}

#[test]
fn a_dataset_without_tokens_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("x");
    IndexedWriter::create(&prefix, TokenType::U16).unwrap().finish().unwrap();
    assert!(message(&prefix).contains("x.bin: is empty"));
}

#[test]
fn a_negative_token_is_an_error_that_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let idx = with(17, &[3]);
    let dataset =
        IndexedDataset::open(pair(folder.path(), &[1, 0, 2, 0, 254, 255, 4, 0, 5, 0], &idx))
            .unwrap();
    let message = dataset.read_sequence(0).unwrap_err().to_string();
    assert!(message.contains("holds -2 at byte 4"), "{message}");
}

#[test]
fn a_file_truncated_after_opening_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = IndexedDataset::open(pair(folder.path(), BIN, IDX)).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(folder.path().join("x.bin"))
        .unwrap()
        .set_len(4)
        .unwrap();
    let message = dataset.read_sequence(0).unwrap_err().to_string();
    assert!(message.contains("truncated"), "{message}");
}

/// For any bytes, opening and reading everything gives tokens or an error.
#[test]
fn random_damage_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let seed = 2024;
    let mut random = Random(seed);
    let mut opened = 0;
    for _ in 0..1000 {
        let (mut idx, mut bin) = (IDX.to_vec(), BIN.to_vec());
        for _ in 0..1 + random.below(3) {
            // Damage to the header has the most effects.
            let at =
                if random.below(2) == 0 { 9 + random.below(25) } else { random.below(idx.len()) };
            idx[at] = if random.below(2) == 0 {
                random.below(256) as u8
            } else {
                idx[at] ^ (1 << random.below(8))
            };
        }
        if random.below(4) == 0 {
            bin.truncate(random.below(bin.len()));
        }
        if random.below(4) == 0 {
            idx.truncate(random.below(idx.len()));
        }
        if let Ok(dataset) = IndexedDataset::open(pair(folder.path(), &bin, &idx)) {
            opened += 1;
            for sequence in 0..dataset.num_sequences() {
                let _ = dataset.read_sequence(sequence);
            }
        }
    }
    assert!(opened > 0, "seed {seed}: some damage, such as a lower type, goes unnoticed");
}
