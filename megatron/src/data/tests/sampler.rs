//! Tests of batches: which rank reads which samples, under every layout.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::counting;
use crate::data::{
    DocumentEnds, Documents, GlobalBatch, Loader, MicroBatch, Sequential, TokenStream,
};

const S: usize = 4;
const PLAIN: DocumentEnds =
    DocumentEnds { token: 0, mask_loss: false, reset_positions: false, reset_attention: false };

fn loader(mbs: usize, gbs: usize, dp_rank: usize, dp_size: usize, vocab_size: usize) -> Loader {
    let folder = tempfile::tempdir().unwrap();
    let stream = TokenStream::new(&[counting(&folder.path().join("x"), &[401])], 0..1).unwrap();
    let source = Arc::new(Sequential::new(stream, S, "train").unwrap());
    Loader::new(
        source,
        GlobalBatch::new(mbs, gbs, dp_rank, dp_size).unwrap(),
        vocab_size,
        Device::Cpu,
    )
}

/// First token of every sample of a microbatch: sample i starts with 4·i.
fn firsts(batch: &MicroBatch) -> Vec<u32> {
    batch.tokens.get(0).unwrap().to_vec1().unwrap()
}

#[test]
fn microbatches_follow_megatrons_order() {
    // c = 40, MBS 2, dp 2: microbatch m of rank 1 is samples 40 + 4·m + 2 + i.
    let batches = loader(2, 8, 1, 2, 1000).microbatches(40).unwrap();
    let samples: Vec<_> = batches.iter().map(|batch| batch.samples.clone()).collect();
    assert_eq!(samples, [[2, 3], [6, 7]]);
    assert_eq!(
        batches.iter().map(firsts).collect::<Vec<_>>(),
        [[4 * 42, 4 * 43], [4 * 46, 4 * 47]]
    );
}

#[test]
fn the_cut_changes_neither_set_nor_order_of_a_steps_samples() {
    for (mbs, dp) in [(1, 1), (2, 1), (12, 1), (1, 2), (3, 2), (1, 3), (2, 6), (1, 12), (4, 3)] {
        let mut step: Vec<(usize, usize, u64, u32)> = Vec::new();
        for rank in 0..dp {
            for (m, batch) in
                loader(mbs, 12, rank, dp, 1000).microbatches(24).unwrap().iter().enumerate()
            {
                let rows = batch.samples.iter().copied().zip(firsts(batch));
                step.extend(rows.map(|(sample, first)| (m, rank, sample, first)));
            }
        }
        // In the order (microbatch, rank), the samples are 0, 1, 2, …, each with its own tokens.
        step.sort_by_key(|&(m, rank, ..)| (m, rank));
        let expected: Vec<_> = (0..12u32).map(|i| (u64::from(i), 4 * (24 + i))).collect();
        let found: Vec<_> = step.into_iter().map(|(_, _, sample, first)| (sample, first)).collect();
        assert_eq!(found, expected, "mbs {mbs}, dp {dp}");
    }
}

#[test]
fn tensors_are_sequence_first_and_labels_are_the_next_tokens() {
    let batch = loader(3, 3, 0, 1, 1000).microbatches(10).unwrap().remove(0);
    let tokens: Vec<Vec<u32>> = batch.tokens.to_vec2().unwrap();
    let labels: Vec<Vec<u32>> = batch.labels.to_vec2().unwrap();
    for (s, (tokens, labels)) in tokens.iter().zip(&labels).enumerate() {
        let expected: Vec<u32> = (10..13).map(|sample| 4 * sample + s as u32).collect();
        assert_eq!(tokens, &expected);
        assert_eq!(labels, &expected.iter().map(|token| token + 1).collect::<Vec<_>>());
    }
    assert_eq!((tokens.len(), tokens[0].len()), (S, 3));
    assert_eq!((batch.loss_mask.dtype(), batch.loss_mask.dims()), (DType::F32, [S, 3].as_slice()));
    assert_eq!(batch.loss_mask.sum_all().unwrap().to_scalar::<f32>().unwrap(), 12.0);
    assert_eq!(batch.counted, 12.0);
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error_that_says_where() {
    // Sample 2 is tokens 8 to 12; 12 is only a label.
    assert!(loader(1, 1, 0, 1, 13).microbatches(2).is_ok());
    let message = loader(1, 1, 0, 1, 12).microbatches(2).err().unwrap().to_string();
    for part in
        ["x.bin", "token id 12 at position 4 of sample 2", "vocabulary has 12", "another tokenizer"]
    {
        assert!(message.contains(part), "{message} lacks {part}");
    }
}

#[test]
fn a_batch_that_does_not_divide_is_refused_with_its_numbers() {
    for (mbs, gbs, rank, dp) in [
        (3, 8, 0, 1),
        (2, 8, 0, 3),
        (1, 0, 0, 1),
        (0, 8, 0, 1),
        (1, 8, 0, 0),
        (usize::MAX, 8, 0, 2),
    ] {
        let message = GlobalBatch::new(mbs, gbs, rank, dp).unwrap_err().to_string();
        assert!(message.contains(&format!("global_batch_size {gbs}")), "{message}");
    }
    assert!(GlobalBatch::new(1, 8, 2, 2).unwrap_err().to_string().contains("rank 2"));
}

#[test]
fn the_loss_at_a_masked_token_does_not_count() {
    let mask = |token: Option<u32>| {
        let ends = token.map(|token| DocumentEnds { token, mask_loss: true, ..PLAIN });
        let batch =
            loader(2, 2, 0, 1, 1000).with_documents(ends).microbatches(0).unwrap().remove(0);
        batch.loss_mask.to_vec2::<f32>().unwrap()
    };
    // Samples 0 and 1 are tokens 0 to 3 and 4 to 7. Token 4 is also the last label of sample 0,
    // which counts.
    assert_eq!(mask(Some(4)), [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]);
    assert_eq!(mask(None), [[1.0; 2]; 4]);
}

#[test]
fn positions_and_sight_begin_anew_behind_the_token_that_ends_a_document() {
    let documents = |token, reset_positions, reset_attention| {
        let ends = DocumentEnds { token, reset_positions, reset_attention, ..PLAIN };
        let batch =
            loader(2, 2, 0, 1, 1000).with_documents(Some(ends)).microbatches(0).unwrap().remove(0);
        assert_eq!(batch.loss_mask.to_vec2::<f32>().unwrap(), [[1.0; 2]; 4]);
        let Documents { positions, first_keys } = batch.documents;
        let table = |table: Option<Tensor>| table.map(|table| table.to_vec2::<u32>().unwrap());
        (table(positions), table(first_keys))
    };
    // Samples 0 and 1 are tokens 0 to 3 and 4 to 7.
    let (positions, first_keys) = documents(5, true, true);
    assert_eq!(positions.unwrap(), [[0, 0], [1, 1], [2, 0], [3, 1]]);
    assert_eq!(first_keys.unwrap(), [[0, 0, 0, 0], [0, 0, 2, 2]]);
    // The end of a sample does not affect the next one, which can come from anywhere.
    let (positions, first_keys) = documents(3, true, true);
    assert_eq!(positions.unwrap(), [[0, 0], [1, 1], [2, 2], [3, 3]]);
    assert_eq!(first_keys.unwrap(), [[0; 4]; 2]);
    assert_eq!(documents(5, true, false).1, None);
    assert_eq!(documents(5, false, true).0, None);
    assert_eq!(documents(5, false, false), (None, None));
}
