//! Tests of samples, in order and shuffled.

use std::collections::BTreeSet;
use std::fs;

use super::counting;
use crate::data::source::permute;
use crate::data::{IndexedDataset, SampleSource, Sequential, Shuffled, TokenStream};

fn sample(source: &impl SampleSource, index: u64) -> Vec<u32> {
    let mut out = vec![0; source.seq_length() + 1];
    source.sample(index, &mut out).unwrap();
    out
}

#[test]
fn a_sample_is_s_tokens_and_the_first_of_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let stream =
        TokenStream::new(&[counting(&folder.path().join("x"), &[5, 3, 9, 4])], 0..4).unwrap();
    let source = Sequential::new(stream, 4, "train").unwrap();
    assert_eq!(source.num_samples(), 5);
    assert_eq!(sample(&source, 0), [0, 1, 2, 3, 4]);
    assert_eq!(sample(&source, 4), [16, 17, 18, 19, 20]);
}

#[test]
fn epochs_follow_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let stream = TokenStream::new(&[counting(&folder.path().join("x"), &[21])], 0..1).unwrap();
    let source = Sequential::new(stream, 4, "train").unwrap();
    assert_eq!(sample(&source, 5 * 1_000_000_007 + 3), sample(&source, 3));
    assert_eq!(sample(&source, u64::MAX), sample(&source, u64::MAX % 5));
}

#[test]
fn a_split_begins_and_ends_with_its_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let stream =
        TokenStream::new(&[counting(&folder.path().join("x"), &[5, 3, 9, 4])], 1..3).unwrap();
    assert_eq!(stream.num_tokens(), 12);
    let mut out = [0; 12];
    stream.read(0, &mut out).unwrap();
    assert_eq!(out, std::array::from_fn(|i| 5 + i as u32));
    assert!(stream.read(1, &mut out).is_err());
}

#[test]
fn datasets_are_laid_end_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let datasets =
        [counting(&folder.path().join("x"), &[3, 2]), counting(&folder.path().join("y"), &[1, 4])];
    let stream = TokenStream::new(&datasets, 1..4).unwrap();
    let mut out = [0; 7];
    stream.read(0, &mut out).unwrap();
    assert_eq!(out, [3, 4, 0, 1, 2, 3, 4]);
    stream.read(1, &mut out[..3]).unwrap();
    assert_eq!(out[..3], [4, 0, 1]);
}

/// An index may list sequences in another order than they are stored.
#[test]
fn scattered_sequences_are_read_in_the_order_of_the_index() {
    let folder = tempfile::tempdir().unwrap();
    counting(&folder.path().join("x"), &[2, 0, 3]);
    let path = folder.path().join("x.idx");
    let mut idx = fs::read(&path).unwrap();
    idx[34..46].copy_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
    idx[46] = 8;
    idx[62] = 0;
    fs::write(&path, idx).unwrap();
    let dataset = std::sync::Arc::new(IndexedDataset::open(folder.path().join("x")).unwrap());
    assert!(!dataset.is_contiguous());
    let stream = TokenStream::new(&[dataset], 0..3).unwrap();
    let mut out = [0; 5];
    stream.read(0, &mut out).unwrap();
    assert_eq!(out, [2, 3, 4, 0, 1]);
    stream.read(2, &mut out[..2]).unwrap();
    assert_eq!(out[..2], [4, 0]);
}

#[test]
fn too_little_data_for_one_sample_is_an_error_with_the_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let stream =
        |tokens| TokenStream::new(&[counting(&folder.path().join("x"), &[tokens])], 0..1).unwrap();
    let message = Sequential::new(stream(4), 4, "train").unwrap_err().to_string();
    assert!(
        message.contains("train split has 4 tokens") && message.contains("takes 5"),
        "{message}"
    );
    assert_eq!(Sequential::new(stream(5), 4, "train").unwrap().num_samples(), 1);
}

#[test]
fn shuffling_is_a_permutation_of_every_epoch() {
    for n in (1..70).chain([255, 256, 257, 1000, 4097]) {
        for (seed, epoch) in [(0, 0), (1234, 0), (1234, 1), (u64::MAX, u64::MAX)] {
            let images: BTreeSet<u64> = (0..n).map(|i| permute(i, n, seed, epoch)).collect();
            assert!(
                images.len() as u64 == n && images.iter().all(|&i| i < n),
                "n {n}, seed {seed}, epoch {epoch}"
            );
        }
    }
}

#[test]
fn orders_differ_between_epochs_and_seeds() {
    let order = |seed, epoch| (0..1000).map(|i| permute(i, 1000, seed, epoch)).collect::<Vec<_>>();
    assert_ne!(order(1, 0), order(1, 1));
    assert_ne!(order(1, 0), order(2, 0));
    // Not an epoch of another seed.
    assert_ne!(order(1, 1), order(2, 0));
    assert_ne!(order(0, 1), order(1, 0));
}

/// Every value is about as often first as any other: 6,000 draws over 6 places, within 5 standard
/// deviations.
#[test]
fn every_place_is_equally_likely() {
    let n = 6;
    let mut counts = [[0i64; 6]; 6];
    for epoch in 0..6000 {
        for i in 0..n {
            counts[i as usize][permute(i, n, 7, epoch) as usize] += 1;
        }
    }
    assert!(counts.iter().flatten().all(|&count| (count - 1000).abs() < 150), "{counts:?}");
}

/// A change of the order would change every resumed run.
#[test]
fn the_order_is_what_it_always_was() {
    let order: Vec<_> = (0..10).map(|i| permute(i, 10, 1234, 0)).collect();
    assert_eq!(order, [6, 2, 5, 0, 7, 8, 9, 3, 4, 1]);
}

#[test]
fn a_shuffled_epoch_has_every_sample_once() {
    let folder = tempfile::tempdir().unwrap();
    let stream = TokenStream::new(&[counting(&folder.path().join("x"), &[41])], 0..1).unwrap();
    let source = Shuffled::new(Sequential::new(stream, 4, "train").unwrap(), 5);
    for epoch in 0..3 {
        let firsts: BTreeSet<u32> = (0..10).map(|i| sample(&source, epoch * 10 + i)[0]).collect();
        assert_eq!(firsts, (0..10).map(|i| 4 * i).collect());
    }
}
