//! Continues prompts token by token with a key/value cache, using a model that is distributed over
//! its ranks.
//!
//! Every rank of the model takes part and gets the same tokens. Top-p: Holtzman et al. 2020.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use kernels::tensor::device::empty;
use kernels::tensor::host::with_slice;
use kernels::tensor::philox::philox4x32;

use crate::data::{Documents, MicroBatch, NamedTensors};
use crate::pipeline::{Payload, Stage};
use crate::tensor_parallel::{Ctx, Phase, TensorParallel};
use crate::{Error, Result};

/// How the next token is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: always take the likeliest token.
    pub temperature: f64,
    /// Draw among this many of the likeliest tokens; 0: among all.
    pub top_k: usize,
    /// Draw among the smallest set of likeliest tokens whose probabilities reach this sum; 1: among
    /// all.
    pub top_p: f64,
    /// Seed of the draws; equal seeds draw equal tokens.
    pub seed: u64,
}

/// The length of a continuation, and the tokens that end it or never occur in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Length {
    /// Maximum number of new tokens.
    pub tokens: usize,
    /// Longest sequence that the model accepts, prompt included.
    pub window: usize,
    /// Tokens that end a continuation.
    pub ends: Vec<u32>,
    /// Rows of the vocabulary that are not tokens (models pad the vocabulary), in order. They are
    /// never drawn.
    pub absent: Vec<Range<usize>>,
}

impl Length {
    /// Checks that the prompt can be continued.
    ///
    /// # Errors
    /// If the prompt is empty or does not fit the window.
    pub fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        if prompt.is_empty() || prompt.len() >= self.window {
            return Err(Error::config(format!(
                "a prompt has {} tokens; it must have at least one and leave room in the model's {} positions",
                prompt.len(),
                self.window
            )));
        }
        Ok(())
    }
}

/// Number of the likeliest tokens to sort first under top-p. Their probabilities usually reach the
/// limit.
const LIKELIEST: usize = 256;

/// Draws an index from `logits` (one row over the vocabulary) for position `position` of sample
/// `sample`.
fn draw(logits: &[f32], sampling: &Sampling, sample: usize, position: usize) -> usize {
    let likeliest =
        (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
    if sampling.temperature <= 0.0 {
        return likeliest;
    }
    let top = f64::from(logits[likeliest]);
    let weight = |i: usize| ((f64::from(logits[i]) - top) / sampling.temperature).exp();
    let (kept, total) = likely(logits, sampling, weight);
    let key = [sampling.seed as u32, (sampling.seed >> 32) as u32];
    let bits = philox4x32([position as u32, sample as u32, 0, 0x67656e], key)[0];
    let mut left = (f64::from(bits) + 0.5) / 2f64.powi(32) * total;
    // Without limits, tokens are in index order: layouts may disagree on the order of two nearly
    // equal logits.
    for &(i, weight) in &kept {
        left -= weight;
        if left <= 0.0 {
            return i;
        }
    }
    kept.last().map_or(likeliest, |(i, _)| *i)
}

/// The tokens to draw among, with their weights, and the sum of the weights.
fn likely(
    logits: &[f32],
    sampling: &Sampling,
    weight: impl Fn(usize) -> f64,
) -> (Vec<(usize, f64)>, f64) {
    if sampling.top_k == 0 && sampling.top_p >= 1.0 {
        let all = (0..logits.len()).filter(|&i| logits[i] > f32::NEG_INFINITY);
        let all: Vec<(usize, f64)> = all.map(|i| (i, weight(i))).collect();
        let total = all.iter().map(|(_, weight)| weight).sum();
        return (all, total);
    }
    let order = (0..logits.len()).filter(|&i| logits[i] > f32::NEG_INFINITY);
    let mut order: Vec<u64> = order.map(|i| sort_key(logits[i], i)).collect();
    let index = |key: u64| (key & u64::from(u32::MAX)) as usize;
    if sampling.top_k > 0 && sampling.top_k < order.len() {
        order.select_nth_unstable(sampling.top_k);
        order.truncate(sampling.top_k);
    }
    let limit = sampling.top_p * order.iter().map(|&key| weight(index(key))).sum::<f64>();
    let mut sorted = 0;
    let mut kept = Vec::new();
    let mut total = 0.0;
    for at in 0..order.len() {
        if at > 0 && total >= limit && sampling.top_p < 1.0 {
            break;
        }
        if at == sorted {
            // Sort the next part.
            let next = (8 * sorted).max(LIKELIEST).min(order.len());
            if next < order.len() {
                order[sorted..].select_nth_unstable(next - sorted);
            }
            order[sorted..next].sort_unstable();
            sorted = next;
        }
        let i = index(order[at]);
        let weight = weight(i);
        kept.push((i, weight));
        total += weight;
    }
    (kept, total)
}

/// Sorts by descending logit, then by ascending index, which is the lower half of the key.
fn sort_key(logit: f32, index: usize) -> u64 {
    let bits = logit.to_bits();
    // As integers, negative floats sort in reverse order.
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!rising) << 32 | index as u64
}

/// `logits`, where rows that are not tokens have a value so low that they are never drawn.
fn without<'a>(logits: &'a [f32], absent: &[Range<usize>]) -> Cow<'a, [f32]> {
    if absent.is_empty() {
        return logits.into();
    }
    let mut kept = logits.to_vec();
    for range in absent {
        kept[range.start.min(logits.len())..range.end.min(logits.len())].fill(f32::NEG_INFINITY);
    }
    kept.into()
}

/// The token's value if none can be drawn; no vocabulary is that large.
const UNDRAWN: u32 = u32::MAX;

/// Draws a token from `logits`, but none of `absent`. Returns [`UNDRAWN`] if the other logits are
/// not finite, since they have no meaningful order then.
fn draw_finite(
    logits: &[f32],
    absent: &[Range<usize>],
    sampling: &Sampling,
    sample: usize,
    position: usize,
) -> u32 {
    match logits.iter().all(|logit| logit.is_finite()) {
        true => draw(&without(logits, absent), sampling, sample, position) as u32,
        false => UNDRAWN,
    }
}

/// A batch of sequences during generation.
struct Session<'a> {
    stage: &'a Stage,
    /// Sequence parallelism is off while decoding, whatever the model was trained with.
    tp: TensorParallel,
    /// One key/value cache per chunk and layer.
    caches: Vec<Vec<Tensor>>,
    samples: Vec<u64>,
}

impl<'a> Session<'a> {
    fn new(stage: &'a Stage, batch: usize, positions: usize) -> Result<Self> {
        let tp = TensorParallel::new(stage.tp.group().clone(), false);
        let mut session =
            Self { stage, tp, caches: Vec::new(), samples: (0..batch as u64).collect() };
        let batch_of = session.microbatch(&vec![0; batch], 1)?;
        let ctx = session.ctx(&batch_of);
        let caches = stage
            .chunks
            .iter()
            .map(|chunk| chunk.caches(positions, batch, &ctx))
            .collect::<Result<_>>()?;
        session.caches = caches;
        Ok(session)
    }

    fn microbatch(&self, tokens: &[u32], length: usize) -> Result<MicroBatch> {
        let (device, shape) = (&self.stage.device, (length, self.samples.len()));
        Ok(MicroBatch {
            tokens: Tensor::from_vec(tokens.to_vec(), shape, device)?,
            labels: Tensor::zeros(shape, DType::U32, device)?,
            loss_mask: Tensor::zeros(shape, DType::F32, device)?,
            counted: 0.0,
            samples: self.samples.clone(),
            step_and_samples: None,
            documents: Documents::default(),
            named: NamedTensors::default(),
        })
    }

    fn ctx<'b>(&'b self, batch: &'b MicroBatch) -> Ctx<'b> {
        Ctx { tp: &self.tp, ..self.stage.ctx(batch, Phase::Evaluate, None) }
    }

    /// Feeds `tokens` (`length` rows, one column per sample) at the positions from `starts` on. On
    /// ranks with the head, returns the logits at row `rows[i]` of each sample i: f32 `[b, vocab]`
    /// on the CPU.
    fn feed(
        &self,
        tokens: &[u32],
        length: usize,
        starts: &[usize],
        rows: &[usize],
    ) -> Result<Option<Tensor>> {
        let stage = self.stage;
        let batch = self.microbatch(tokens, length)?;
        let ctx = self.ctx(&batch);
        let (rank, pp) = (stage.pp.rank(), stage.pp.size());
        for (at, (chunk, caches)) in stage.chunks.iter().zip(&self.caches).enumerate() {
            let input = if at * pp + rank == 0 {
                None
            } else {
                let shape = (length, self.samples.len(), stage.hidden);
                let buffer = empty(shape, stage.dtype, &stage.device)?;
                stage.pp.recv(&buffer, (rank + pp - 1) % pp, Payload::Activation.tag())?.wait()?;
                Some(buffer)
            };
            let x = chunk.decode(input, caches, starts, &ctx)?;
            match &chunk.output {
                Some(head) => {
                    return Ok(Some(
                        chunk.logits_at(head.as_ref(), &x, rows, &ctx)?.to_device(&Device::Cpu)?,
                    ));
                }
                None => stage.pp.send(&x.0, (rank + 1) % pp, Payload::Activation.tag())?.wait()?,
            }
        }
        Ok(None)
    }
}

impl Stage {
    /// Continues each prompt until it has `length.tokens` new tokens, draws a token that ends it,
    /// or fills the window. Calls `on_token` with each new (sample, token) as it is drawn.
    /// Collective over the ranks of a model; all get the same tokens.
    ///
    /// # Errors
    /// If a prompt is empty or does not fit the window, logits are not finite, or a kernel or a
    /// peer fails.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        length: &Length,
        sampling: &Sampling,
        on_token: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<Vec<u32>>> {
        prompts.iter().try_for_each(|prompt| length.check_prompt(prompt))?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let positions = longest.saturating_add(length.tokens).min(length.window);
        let batch = prompts.len();
        let mut new: Vec<Vec<u32>> = vec![Vec::new(); batch];
        if batch == 0 || length.tokens == 0 {
            return Ok(new);
        }
        let session = Session::new(self, batch, positions)?;
        // Prompts are fed together, padded at the end. The padding's entries in the cache are
        // overwritten before they are read.
        let padded: Vec<u32> = (0..longest)
            .flat_map(|i| prompts.iter().map(move |p| p.get(i).copied().unwrap_or(0)))
            .collect();
        let rows: Vec<usize> = prompts.iter().map(|p| p.len() - 1).collect();
        let mut logits = session.feed(&padded, longest, &vec![0; batch], &rows)?;
        let mut lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let mut open = vec![true; batch];
        loop {
            let drawn = match &logits {
                Some(logits) => with_slice(logits, "draw", |all: &[f32]| {
                    let rows = all.chunks_exact(all.len() / batch).enumerate();
                    Ok(rows
                        .map(|(i, row)| draw_finite(row, &length.absent, sampling, i, lengths[i]))
                        .collect())
                })?,
                None => vec![0u32; batch],
            };
            let next = Tensor::from_vec(drawn, batch, &Device::Cpu)?.to_device(&self.device)?;
            self.pp.broadcast(&next, self.pp.size() - 1)?.wait()?;
            let next: Vec<u32> = next.to_vec1()?;
            let starts: Vec<usize> = lengths.clone();
            for i in 0..batch {
                if !open[i] {
                    continue;
                }
                // Every rank received this value, so all ranks end.
                if next[i] == UNDRAWN {
                    return Err(Error::Diverged(format!(
                        "the model's logits after token {} of prompt {} are not finite, so no \
                         token can be sampled: training diverged, a file is damaged, or 16 bits \
                         are too narrow; use an earlier checkpoint, or fp32",
                        lengths[i],
                        i + 1
                    )));
                }
                if length.ends.contains(&next[i]) {
                    open[i] = false;
                    continue;
                }
                new[i].push(next[i]);
                on_token(i, next[i]);
                lengths[i] += 1;
                open[i] = new[i].len() < length.tokens && lengths[i] < positions;
            }
            if !open.contains(&true) {
                self.params.release_weights()?;
                return Ok(new);
            }
            // Finished samples stay in the batch. Their input is ignored, but must be a valid
            // token.
            let next: Vec<u32> = next
                .into_iter()
                .zip(&open)
                .map(|(token, open)| if *open { token } else { 0 })
                .collect();
            let starts: Vec<usize> =
                starts.iter().map(|start| (*start).min(positions - 1)).collect();
            logits = session.feed(&next, 1, &starts, &vec![0; batch])?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3 };

    #[test]
    fn sampling_follows_the_distribution_and_the_seed() {
        let logits = [0.0f32, 1.0, 2.0];
        let mut counts = [0usize; 3];
        for position in 0..20_000 {
            let drawn = draw(&logits, &PLAIN, 0, position);
            assert_eq!(drawn, draw(&logits, &PLAIN, 0, position));
            counts[drawn] += 1;
        }
        let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            let expected = f64::from(logit).exp() / total;
            assert!((*count as f64 / 20_000.0 - expected).abs() < 0.015, "{counts:?}");
        }
    }

    /// A reference for small vocabularies that sorts all tokens.
    fn by_sorting(logits: &[f32], sampling: &Sampling) -> Vec<usize> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(if sampling.top_k > 0 { sampling.top_k } else { usize::MAX });
        let weights: Vec<f64> = order
            .iter()
            .map(|&i| (f64::from(logits[i] - logits[order[0]]) / sampling.temperature).exp())
            .collect();
        let (all, mut total) = (weights.iter().sum::<f64>(), 0.0);
        let kept = weights.iter().take_while(|&&weight| {
            let is_kept = total == 0.0 || total < sampling.top_p * all || sampling.top_p >= 1.0;
            total += weight;
            is_kept
        });
        let kept = kept.count();
        order.truncate(kept);
        order
    }

    #[test]
    fn those_among_which_is_drawn_are_the_likeliest_without_sorting_all() {
        let random = |i: usize| philox4x32([i as u32, 0, 0, 0], [7, 7])[0];
        // Contains many equal logits.
        let logits: Vec<f32> = (0..5000).map(|i| (random(i) % 512) as f32 / -64.0 + 3.0).collect();
        let cases = [
            (0, 0.1),
            (0, 0.5),
            (0, 0.95),
            (0, 0.999),
            (1, 1.0),
            (40, 1.0),
            (300, 0.9),
            (4999, 0.99),
            (9000, 0.7),
        ];
        for (temperature, (top_k, top_p)) in
            [0.3, 1.0, 3.0].into_iter().flat_map(|t| cases.map(|case| (t, case)))
        {
            let sampling = Sampling { temperature, top_k, top_p, seed: 0 };
            let (kept, total) =
                likely(&logits, &sampling, |i| (f64::from(logits[i] - 3.0) / temperature).exp());
            let kept_ones: Vec<usize> = kept.iter().map(|(i, _)| *i).collect();
            assert_eq!(kept_ones, by_sorting(&logits, &sampling), "{sampling:?}");
            assert!(
                (kept.iter().map(|(_, weight)| weight).sum::<f64>() / total - 1.0).abs() < 1e-12
            );
        }
        let greedy = Sampling { temperature: 0.0, ..PLAIN };
        assert_eq!(draw(&logits, &greedy, 0, 0), by_sorting(&logits, &PLAIN)[0]);
        assert_eq!(draw(&[-0.0, 0.0, 0.0], &greedy, 0, 0), 1);
    }

    #[test]
    fn nothing_is_drawn_from_logits_that_are_not_finite() {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, ..PLAIN };
            assert!(draw_finite(&[0.0, 1.0], &[], &sampling, 0, 0) < 2);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(draw_finite(&[0.0, bad], &[], &sampling, 0, 0), UNDRAWN);
            }
        }
    }

    #[test]
    fn rows_that_are_no_tokens_are_never_drawn() {
        let logits = [9.0f32, 0.0, 8.0, 0.5, -1.0, 7.0];
        let absent = [0..1, 2..3, 5..9];
        let limits = [(1.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 6, 0.999), (4.0, 0, 0.9), (0.0, 0, 1.0)];
        for (temperature, top_k, top_p) in limits {
            let sampling = Sampling { temperature, top_k, top_p, seed: 3 };
            let drawn =
                (0..500).map(|position| draw_finite(&logits, &absent, &sampling, 0, position));
            let drawn: std::collections::BTreeSet<u32> = drawn.collect();
            let expected: &[u32] = if temperature == 0.0 { &[3] } else { &[1, 3, 4] };
            assert_eq!(drawn.into_iter().collect::<Vec<_>>(), expected, "{sampling:?}");
        }
        // Their values do not matter as long as they are finite.
        assert_eq!(
            draw_finite(&[f32::NAN, 0.0], std::slice::from_ref(&(0..1)), &PLAIN, 0, 0),
            UNDRAWN
        );
    }

    #[test]
    fn limits_keep_the_likeliest_tokens() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let among = |sampling: Sampling| {
            let drawn: std::collections::BTreeSet<usize> =
                (0..2000).map(|p| draw(&logits, &sampling, 0, p)).collect();
            drawn.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(among(Sampling { temperature: 0.0, ..PLAIN }), [2]);
        assert_eq!(among(Sampling { top_k: 2, ..PLAIN }), [1, 2]);
        // The probabilities are 0.64, 0.24, 0.09, 0.03.
        assert_eq!(among(Sampling { top_p: 0.6, ..PLAIN }), [2]);
        assert_eq!(among(Sampling { top_p: 0.7, ..PLAIN }), [1, 2]);
        assert_eq!(among(PLAIN), [0, 1, 2, 3]);
    }
}
