//! Tests of the orders of samples in a configuration, and of blends.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::{counting, names, write};
use crate::config::{DataConfig, DataloaderType};
use crate::data::{Datasets, DocumentEnds, SampleCounts, SampleSource, open};

const COUNTS: SampleCounts = SampleCounts { train: 100, valid: 10, test: 10 };

fn config(folder: &Path, entries: &[&str], order: DataloaderType) -> DataConfig {
    let entry = |entry: &&str| match entry.parse::<f64>() {
        Ok(_) => entry.to_string(),
        Err(_) => folder.join(entry).display().to_string(),
    };
    DataConfig {
        data_path: entries.iter().map(entry).collect(),
        split: "8,1,1".into(),
        tokenizer: None,
        tokenizer_options: Default::default(),
        dataloader_type: order,
        eod_mask_loss: false,
        reset_position_ids: false,
        reset_attention_mask: false,
        cache_dir: folder.join("cache"),
        mock: false,
    }
}

fn opened(cfg: &DataConfig, seed: u64) -> Datasets {
    open(cfg, 4, seed, Some(1000), COUNTS).unwrap()
}

/// The first token of each of the first `count` samples.
fn firsts(source: &dyn SampleSource, count: u64) -> Vec<u32> {
    let mut sample = vec![0; source.seq_length() + 1];
    let mut first = |i| {
        source.sample(i, &mut sample).unwrap();
        sample[0]
    };
    (0..count).map(&mut first).collect()
}

#[test]
fn a_sample_of_megatrons_order_runs_over_documents_in_the_order_of_the_index() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[7; 10]);
    let mut cfg = config(folder.path(), &["x"], DataloaderType::Single);
    cfg.split = "1".into();
    let data = open(&cfg, 69, 3, Some(70), SampleCounts { train: 1, ..COUNTS }).unwrap();
    let mut sample = vec![0; 70];
    data.train.sample(0, &mut sample).unwrap();
    let documents: BTreeSet<u32> = sample.chunks(7).map(|document| document[0] / 7).collect();
    assert_eq!(documents.len(), 10);
    let runs = |document: &[u32]| document.windows(2).all(|pair| pair[1] == pair[0] + 1);
    assert!(sample.chunks(7).all(runs) && !runs(&sample));
}

#[test]
fn single_gives_the_samples_asked_for_and_depends_on_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    let cfg = config(folder.path(), &["x"], DataloaderType::Single);
    let (one, two) = (opened(&cfg, 1), opened(&cfg, 2));
    assert!(one.train.num_samples() >= 100);
    assert_ne!(firsts(&*one.train, 100), firsts(&*two.train, 100));
    assert_eq!(firsts(&*one.train, 100), firsts(&*opened(&cfg, 1).train, 100));
    // Splits do not share documents.
    let (valid, test) = (one.valid.unwrap(), one.test.unwrap());
    assert!(firsts(&*one.train, 100).iter().all(|&token| token < 320));
    assert!(firsts(&*valid, 10).iter().all(|token| (320..360).contains(token)));
    assert!(firsts(&*test, 10).iter().all(|token| (360..400).contains(token)));
}

#[test]
fn cyclic_gives_every_sample_once_an_epoch_in_orders_that_differ() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    let single = opened(&config(folder.path(), &["x"], DataloaderType::Single), 1).train;
    let cyclic = opened(&config(folder.path(), &["x"], DataloaderType::Cyclic), 1).train;
    let n = single.num_samples();
    let mut expected = firsts(&*single, n);
    let read = firsts(&*cyclic, 2 * n);
    let (mut first, mut second) = (read[..n as usize].to_vec(), read[n as usize..].to_vec());
    assert!(first != second && first != expected);
    [&mut expected, &mut first, &mut second].into_iter().for_each(|order| order.sort());
    assert!(first == expected && second == expected);
}

/// Resuming needs only the position.
#[test]
fn every_order_is_a_function_of_the_position() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    counting(&folder.path().join("y"), &[9; 40]);
    let orders = [
        DataloaderType::Sequential,
        DataloaderType::Shuffled,
        DataloaderType::Single,
        DataloaderType::Cyclic,
    ];
    for order in orders {
        for entries in [&["x"][..], &["x", "y"], &["0.7", "x", "0.3", "y"]] {
            let cfg = config(folder.path(), entries, order);
            let read = firsts(&*opened(&cfg, 1).train, 250);
            let resumed = opened(&cfg, 1).train;
            let mut sample = vec![0; 5];
            for i in [249, 0, 131, 7, 248] {
                resumed.sample(i, &mut sample).unwrap();
                assert_eq!(sample[0], read[i as usize], "{order:?} of {entries:?}, sample {i}");
            }
        }
    }
}

#[test]
fn a_blend_takes_from_each_dataset_by_its_weight() {
    let folder = tempfile::tempdir().unwrap();
    // x counts from 0 to 399; every token of y is larger.
    counting(&folder.path().join("x"), &[10; 40]);
    let high: Vec<_> = (0..40).map(|_| vec![vec![500; 10]]).collect();
    super::dataset(&folder.path().join("y"), crate::data::TokenType::U16, &high);
    for order in [
        DataloaderType::Sequential,
        DataloaderType::Shuffled,
        DataloaderType::Single,
        DataloaderType::Cyclic,
    ] {
        let data = opened(&config(folder.path(), &["3", "x", "1", "y"], order), 1);
        assert_eq!(data.train.num_samples(), 100);
        let from_y = firsts(&*data.train, 100).iter().filter(|&&token| token == 500).count();
        assert_eq!(from_y, 25, "{order:?}");
    }
}

#[test]
fn weights_belong_to_the_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    counting(&folder.path().join("y"), &[9; 40]);
    let print = |entries: &[&str]| {
        opened(&config(folder.path(), entries, DataloaderType::Single), 1).fingerprint
    };
    let prints = [print(&["x", "y"]), print(&["1", "x", "1", "y"]), print(&["1", "x", "2", "y"])];
    assert_eq!(prints.iter().collect::<BTreeSet<_>>().len(), 3);
}

#[test]
fn texts_blend_too_under_one_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.txt", "a a a a\n\n".repeat(50));
    write(folder.path(), "b.txt", "b b b b\n\n".repeat(50));
    let mut cfg =
        config(folder.path(), &["0.8", "a.txt", "0.2", "b.txt"], DataloaderType::Sequential);
    cfg.tokenizer = Some("byte".into());
    let data = opened(&cfg, 1);
    let mut sample = vec![0; 5];
    let mut from_b = 0;
    for i in 0..100 {
        data.train.sample(i, &mut sample).unwrap();
        from_b += usize::from(sample.contains(&u32::from(b'b')));
    }
    assert_eq!(from_b, 20);
}

#[test]
fn ranks_that_build_an_order_at_once_build_it_once() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 4000]);
    let cfg = config(folder.path(), &["2", "x", "1", "x"], DataloaderType::Single);
    let orders: BTreeSet<Vec<u32>> = std::thread::scope(|scope| {
        let open = || open(&cfg, 4, 1, Some(40_000), COUNTS).unwrap();
        let ranks: Vec<_> =
            (0..6).map(|_| scope.spawn(move || firsts(&*open().train, 100))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(orders.len(), 1);
    let cached = names(&folder.path().join("cache"));
    // Three splits of two shares that are one epoch each, and the orders of three blends, two of
    // which are equal.
    let is_index = |name: &&String| name.ends_with(".index");
    assert_eq!(
        (cached.iter().filter(is_index).count(), cached.len()),
        (3 + 2, 1 + 2 * (3 + 2)),
        "{cached:?}"
    );
}

#[test]
fn a_damaged_order_is_made_anew_and_one_that_is_damaged_during_the_run_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    let cfg = config(folder.path(), &["x"], DataloaderType::Single);
    let order = firsts(&*opened(&cfg, 1).train, 100);
    let cache = folder.path().join("cache");
    let damage = |how: &dyn Fn(&mut Vec<u8>)| {
        for name in names(&cache).iter().filter(|name| name.ends_with(".index")) {
            let mut bytes = fs::read(cache.join(name)).unwrap();
            how(&mut bytes);
            fs::write(cache.join(name), bytes).unwrap();
        }
    };
    // Swaps two samples, which keeps the file well-formed.
    let last_two = |bytes: &mut Vec<u8>| bytes[..].last_chunk_mut::<8>().unwrap().rotate_left(4);
    for how in [&|bytes: &mut Vec<u8>| bytes.truncate(100), &last_two as &dyn Fn(&mut Vec<u8>)] {
        damage(how);
        assert_eq!(firsts(&*opened(&cfg, 1).train, 100), order);
    }
    let opened = opened(&cfg, 1);
    damage(&|bytes| bytes[64..].fill(0xff));
    let message = opened.train.sample(0, &mut [0; 5]).unwrap_err().to_string();
    assert!(message.contains(".index: is damaged") && message.contains("remove it"), "{message}");
}

#[test]
fn what_megatrons_order_cannot_do_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    let cfg = config(folder.path(), &["x"], DataloaderType::Single);
    let message = |seed, seq_length| {
        open(&cfg, seq_length, seed, Some(1000), COUNTS).err().unwrap().to_string()
    };
    assert!(message(1 << 32, 4).contains("below 2^32"));
    assert!(message(1, 0).contains("seq_length 0"));
}

#[test]
fn the_end_of_a_document_matters_only_if_something_ends_documents() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    let mut cfg = config(folder.path(), &["x"], DataloaderType::Single);
    cfg.eod_mask_loss = true;
    let message = open(&cfg, 4, 1, Some(1000), COUNTS).err().unwrap().to_string();
    assert!(message.contains("eod_mask_loss") && message.contains("--tokenizer"), "{message}");
    cfg.tokenizer = Some("byte".into());
    let ends = |mask_loss, reset_positions, reset_attention| {
        Some(DocumentEnds { token: 256, mask_loss, reset_positions, reset_attention })
    };
    assert_eq!(opened(&cfg, 1).document_ends, ends(true, false, false));
    cfg.eod_mask_loss = false;
    assert_eq!(opened(&cfg, 1).document_ends, None);
    (cfg.reset_position_ids, cfg.reset_attention_mask) = (true, false);
    assert_eq!(opened(&cfg, 1).document_ends, ends(false, true, false));
    (cfg.reset_position_ids, cfg.reset_attention_mask) = (false, true);
    assert_eq!(opened(&cfg, 1).document_ends, ends(false, false, true));
    cfg.tokenizer = None;
    let message = open(&cfg, 4, 1, Some(1000), COUNTS).err().unwrap().to_string();
    assert!(
        message.contains("reset_attention_mask") && message.contains("--tokenizer"),
        "{message}"
    );
}

#[test]
fn weights_without_a_number_of_samples_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[10; 40]);
    let none = SampleCounts { train: 0, valid: 0, test: 0 };
    let refusal = |entries| {
        let cfg = config(folder.path(), entries, DataloaderType::Sequential);
        open(&cfg, 4, 1, Some(1000), none).err().map(|error| error.to_string())
    };
    assert!(refusal(&["1", "x"]).unwrap().contains("the data path has weights"));
    assert_eq!(refusal(&["x"]), None);
}
