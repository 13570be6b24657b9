//! Tests from a configuration to samples.

use std::fs;
use std::path::{Path, PathBuf};

use super::{counting, names, write};
use crate::config::{DataConfig, DataloaderType};
use crate::data::{Datasets, SampleCounts, SampleSource, open, prepare};

const COUNTS: SampleCounts = SampleCounts { train: 10, valid: 2, test: 2 };

fn config(paths: &[PathBuf], tokenizer: Option<&str>, cache: &Path) -> DataConfig {
    DataConfig {
        data_path: paths.iter().map(|path| path.display().to_string()).collect(),
        split: "100,0,0".into(),
        tokenizer: tokenizer.map(str::to_owned),
        tokenizer_options: Default::default(),
        dataloader_type: DataloaderType::Sequential,
        eod_mask_loss: false,
        reset_position_ids: false,
        reset_attention_mask: false,
        cache_dir: cache.to_path_buf(),
        mock: false,
    }
}

fn sample(source: &dyn SampleSource, index: u64) -> Vec<u32> {
    let mut out = vec![0; source.seq_length() + 1];
    source.sample(index, &mut out).unwrap();
    out
}

fn refusal(cfg: &DataConfig, seq_length: usize, vocab_size: Option<usize>) -> String {
    open(cfg, seq_length, 1, vocab_size, COUNTS).err().unwrap().to_string()
}

fn open_bytes(folder: &Path) -> Datasets {
    open(&config(&[folder.join("text")], Some("byte"), &folder.join("cache")), 3, 1, None, COUNTS)
        .unwrap()
}

#[test]
fn text_becomes_samples_with_documents_ended() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "text/b.txt", "c");
    write(folder.path(), "text/a.txt", "a\n\nb");
    let data = open_bytes(folder.path());
    assert_eq!((data.vocab_size, data.train.num_samples()), (257, 2));
    assert_eq!(sample(&*data.train, 0), [97, 10, 10, 98]);
    assert_eq!(sample(&*data.train, 1), [98, 256, 99, 256]);
    assert!(data.valid.is_none() && data.test.is_none());
}

#[test]
fn tokenized_text_is_reused_and_made_anew_when_the_text_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "text/a.txt", "abcdef");
    let first = open_bytes(folder.path());
    let cached = names(&folder.path().join("cache"));
    let idx = folder
        .path()
        .join("cache")
        .join(cached.iter().find(|name| name.ends_with(".idx")).unwrap());
    let written = fs::metadata(&idx).unwrap().modified().unwrap();
    assert_eq!(open_bytes(folder.path()).fingerprint, first.fingerprint);
    assert_eq!(fs::metadata(&idx).unwrap().modified().unwrap(), written);
    fs::write(path, "ABCDEF").unwrap();
    let second = open_bytes(folder.path());
    assert_eq!(sample(&*second.train, 0), [65, 66, 67, 68]);
    assert_ne!(second.fingerprint, first.fingerprint);
}

#[test]
fn a_damaged_cache_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "text/a.txt", "abcdef");
    open_bytes(folder.path());
    for suffix in [".idx", ".bin", ".sums"] {
        let cache = folder.path().join("cache");
        let name = names(&cache).into_iter().find(|name| name.ends_with(suffix)).unwrap();
        let path = cache.join(name);
        let whole = fs::read(&path).unwrap();
        // Truncated, and with a flipped bit in the first token in `.bin`.
        let flipped = [&[whole[0] ^ 1], &whole[1..]].concat();
        for damaged in [&whole[..5], &flipped] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(sample(&*open_bytes(folder.path()).train, 0), [97, 98, 99, 100]);
            assert_eq!(fs::read(&path).unwrap(), whole, "{suffix}");
        }
    }
}

#[test]
fn ranks_that_start_at_once_all_get_the_same_and_leave_no_halves() {
    let folder = tempfile::tempdir().unwrap();
    let content: String = (0..500).map(|i| format!("line {i} of {}\n\n", i * i)).collect();
    let text = write(folder.path(), "text/a.txt", content);
    let cache = folder.path().join("cache");
    let cfg = config(&[text], Some("train:400"), &cache);
    let prints: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| open(&cfg, 8, 1, None, COUNTS).unwrap().fingerprint))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(prints.iter().all(|print| print == &prints[0]));
    assert_eq!(
        names(&cache).len(),
        6,
        "lock, tokenizer, bin and idx, and two files of checksums: {:?}",
        names(&cache)
    );
}

#[test]
fn splits_do_not_overlap_and_cover_everything() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 10]);
    let mut cfg = config(&[folder.path().join("x")], None, folder.path());
    cfg.split = "8,1,1".into();
    let data = open(&cfg, 4, 1, Some(100), COUNTS).unwrap();
    let (valid, test) = (data.valid.unwrap(), data.test.unwrap());
    assert_eq!((data.train.num_samples(), valid.num_samples(), test.num_samples()), (19, 2, 2));
    assert_eq!(
        (sample(&*data.train, 18)[4], sample(&*valid, 0)[0], sample(&*test, 0)[0]),
        (76, 80, 90)
    );
}

#[test]
fn either_file_of_a_pair_names_the_dataset() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x.y"), &[10]);
    for name in ["x.y", "x.y.idx", "x.y.bin"] {
        let data =
            open(&config(&[folder.path().join(name)], None, folder.path()), 4, 1, Some(10), COUNTS)
                .unwrap();
        assert_eq!(data.train.num_samples(), 2);
    }
}

#[test]
fn shuffled_data_has_another_order_of_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[401]);
    let mut cfg = config(&[folder.path().join("x")], None, folder.path());
    cfg.dataloader_type = DataloaderType::Shuffled;
    let order = |seed| {
        let train = open(&cfg, 4, seed, Some(401), COUNTS).unwrap().train;
        (0..100).map(|i| sample(&*train, i)[0]).collect::<Vec<_>>()
    };
    let mut sorted = order(1);
    assert_ne!(sorted, order(2));
    sorted.sort();
    assert_eq!(sorted, (0..100).map(|i| 4 * i).collect::<Vec<_>>());
}

#[test]
fn data_and_settings_that_do_not_fit_are_refused_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let text = write(root, "t.txt", "text");
    counting(&root.join("x"), &[10]);
    let prefix = root.join("x");
    let case = |paths: &[&PathBuf], tokenizer, seq_length, vocab_size, parts: &[&str]| {
        let paths: Vec<PathBuf> = paths.iter().map(|&path| path.clone()).collect();
        let message =
            refusal(&config(&paths, tokenizer, &root.join("cache")), seq_length, vocab_size);
        assert!(
            parts.iter().all(|part| message.contains(part)),
            "{message} lacks one of {parts:?}"
        );
    };
    case(&[], None, 4, None, &["--data-path"]);
    counting(&root.join("y_text_document"), &[10]);
    case(
        &[&root.join("y")],
        None,
        4,
        None,
        &["y: does not exist", "did you mean", "y_text_document?"],
    );
    case(&[&root.join("none")], None, 4, None, &["none: does not exist", "none.idx"]);
    case(&[&text], None, 4, None, &["t.txt", "--tokenizer"]);
    case(&[&text, &prefix], Some("byte"), 4, None, &["mixes text", "t.txt", "x"]);
    case(&[&prefix], None, 4, None, &["--vocab-size"]);
    case(&[&prefix], Some("train:300"), 4, None, &["train:300", "needs text"]);
    case(&[&text], Some("byte"), 4, Some(256), &["257 tokens", "vocabulary is 256"]);
    case(&[&text], Some("byte"), 5, None, &["train split has 5 tokens", "takes 6"]);
    case(&[&prefix], None, 0, Some(10), &["seq_length is 0"]);
}

/// Documents of a dataset, and paragraphs of text files, are not cut.
#[test]
fn a_part_that_gets_too_little_is_told_with_why() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let whole = write(root, "whole.txt", "0123456789");
    let cut = write(root, "cut.txt", "01234\n\n01234\n\n01234\n\n");
    for order in [DataloaderType::Sequential, DataloaderType::Shuffled, DataloaderType::Single] {
        let of = |path: &PathBuf, split: &str| {
            let base = config(std::slice::from_ref(path), Some("byte"), &root.join("cache"));
            let cfg = DataConfig { split: split.into(), dataloader_type: order, ..base };
            open(&cfg, 4, 1, None, COUNTS).map(|data| data.description.join("\n"))
        };
        for (path, split, told, is_note) in [
            (
                &whole,
                "9,1",
                "validation data: --split 9,1 does not cut documents, and there is only 1: all of it goes to train",
                true,
            ),
            (&whole, "1", "0 to validate, 0 to test (split 1)", false),
            (
                &cut,
                "9,1,1",
                "(split 9,1,1 does not cut paragraphs (sequences): of 3, 2 to train, 1 to valid, 0 to test)",
                false,
            ),
            (&cut, "2,1", "(split 2,1)", false),
        ] {
            let found = of(path, split).unwrap();
            assert!(
                found.contains(told) && found.contains("note: ") == is_note,
                "{order:?} {split}: {found}"
            );
        }
        // The message names the user's path, not the cached dataset.
        let message = of(&whole, "0,1").err().unwrap().to_string();
        assert!(message.contains("whole.txt: the train split has 0 tokens"), "{message}");
        assert!(message.contains("there is only 1: all of it goes to valid"), "{message}");
    }
}

#[test]
fn a_run_prepared_finds_its_caches() {
    let folder = tempfile::tempdir().unwrap();
    let text = write(folder.path(), "t.txt", "some text, some text");
    let cache = folder.path().join("cache");
    let cfg = config(&[text], Some("train:300"), &cache);
    let prepared = prepare(&cfg).unwrap();
    let cached = names(&cache);
    assert_eq!(open(&cfg, 4, 1, None, COUNTS).unwrap().fingerprint, prepared.fingerprint);
    assert_eq!(names(&cache), cached);
}

/// So that a resumed run with other ids than before reports it.
#[test]
fn the_same_text_with_other_ids_has_another_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        write(folder.path(), "t.txt", "Hello <|endoftext|> there.\n\nGeneral Kenobi.".repeat(20));
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tokenizers/gpt2.json");
    let fingerprint = |literal: bool| {
        let mut cfg =
            config(std::slice::from_ref(&text), Some(tokenizer), &folder.path().join("cache"));
        cfg.tokenizer_options.split_special_tokens = literal;
        prepare(&cfg).unwrap().fingerprint
    };
    assert_ne!(fingerprint(false), fingerprint(true));
    assert_eq!(fingerprint(false), fingerprint(false));
}

#[test]
fn made_up_data_are_the_same_everywhere_and_documents_of_any_vocabulary() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mock = |folder: &Path, tokenizer: Option<&str>, vocab_size: Option<usize>| {
        let cfg =
            DataConfig { mock: true, split: "90,5,5".into(), ..config(&[], tokenizer, folder) };
        open(&cfg, 64, 1, vocab_size, COUNTS)
    };
    let (first, second) =
        (mock(here.path(), None, Some(50)).unwrap(), mock(there.path(), None, Some(50)).unwrap());
    assert_eq!((first.vocab_size, &first.fingerprint), (50, &second.fingerprint));
    for (a, b) in [(&first.train, &second.train), (&first.valid.unwrap(), &second.valid.unwrap())] {
        for index in 0..20 {
            let tokens = sample(&**a, index);
            assert_eq!(tokens, sample(&**b, index));
            // Tokens count up, wrap around at the end of the vocabulary, and restart after the end
            // of a document.
            let steps = tokens.windows(2).all(|two| {
                two[1] == (two[0] + 1) % 50 || two[0] == 49 && two[1] == 1 || two[1] == 49
            });
            assert!(steps, "{tokens:?}");
        }
    }
    assert_eq!(mock(here.path(), Some("byte"), None).unwrap().vocab_size, 257);
    let ends = DataConfig { mock: true, eod_mask_loss: true, ..config(&[], None, here.path()) };
    assert_eq!(open(&ends, 64, 1, Some(50), COUNTS).unwrap().document_ends.unwrap().token, 49);
    let refused = |result: crate::Result<Datasets>| result.err().unwrap().to_string();
    assert!(refused(mock(here.path(), None, None)).contains("give --vocab-size"));
    assert!(refused(mock(here.path(), Some("train:300"), None)).contains("needs text to train on"));
}
