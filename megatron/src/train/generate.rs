//! Continues a prompt with the model as it is, on whatever layout it lies.
//!
//! Every new token runs the whole sequence again; the sampled token is the same on all ranks.

use candle_core::{Device, Tensor};
use kernels::philox::philox4x32;

use crate::data::MicroBatch;
use crate::pipeline::{Payload, Stage};
use crate::tensor_parallel::Phase;
use crate::tensor_parallel::layout::Stream;
use crate::{Error, Result};

/// How the next token is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// 0: always the likeliest token.
    pub temperature: f64,
    /// Draw among this many likeliest tokens; 0: all.
    pub top_k: usize,
    pub seed: u64,
}

/// The index drawn from `logits` (one row over the vocabulary) for position `position`.
fn sample(logits: &[f32], sampling: &Sampling, position: usize) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if sampling.temperature <= 0.0 {
        return order[0];
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let top = f64::from(logits[order[0]]);
    let weight = |i: usize| ((f64::from(logits[i]) - top) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let key = [sampling.seed as u32, (sampling.seed >> 32) as u32];
    let bits = philox4x32([position as u32, 0, 0, 0x67656e], key)[0];
    let mut left = (f64::from(bits) + 0.5) / 2f64.powi(32) * total;
    for &i in &order {
        left -= weight(i);
        if left <= 0.0 {
            return i;
        }
    }
    order[order.len() - 1]
}

impl Stage {
    /// The logits (f32 `[vocab]`) that follow `tokens`; `None` on ranks without the head. Collective over the model's ranks.
    fn next_logits(&self, tokens: &[u32]) -> Result<Option<Vec<f32>>> {
        // Sequence parallelism needs a length that divides by tp; causal attention never looks at what follows.
        let length = tokens.len().next_multiple_of(self.tp.size());
        let mut padded = tokens.to_vec();
        padded.resize(length, 0);
        let batch = MicroBatch {
            tokens: Tensor::from_vec(padded, (length, 1), &self.device)?,
            labels: Tensor::zeros((length, 1), candle_core::DType::U32, &self.device)?,
            loss_mask: Tensor::zeros((length, 1), candle_core::DType::F32, &self.device)?,
            samples: vec![0],
        };
        let ctx = self.ctx(&batch, Phase::Evaluate, 0.0);
        let (rank, pp) = (self.pp.rank(), self.pp.size());
        let last = pp * self.chunks.len() - 1;
        for (at, chunk) in self.chunks.iter().enumerate() {
            let virtual_stage = at * pp + rank;
            let input = if virtual_stage == 0 {
                None
            } else {
                let shape = (self.tp.stream_length(length)?, 1, self.hidden);
                let buffer = Tensor::zeros(shape, self.dtype, &self.device)?;
                self.pp.recv(&buffer, (rank + pp - 1) % pp, Payload::Activation.tag())?.wait()?;
                Some(buffer)
            };
            let x = chunk.infer(input, &ctx)?;
            match &chunk.head {
                Some(head) if virtual_stage == last => {
                    let logits = head.full_logits(&x, tokens.len() - 1..tokens.len(), &ctx)?;
                    return Ok(Some(logits.flatten_all()?.to_vec1()?));
                }
                _ => {
                    let Stream(x) = x;
                    self.pp.send(&x, (rank + 1) % pp, Payload::Activation.tag())?.wait()?;
                }
            }
        }
        Ok(None)
    }

    /// Continues `prompt` by `count` tokens or until `end`. `window`: the longest sequence the model takes; older tokens
    /// fall out of sight. Collective over the ranks of a model; all get the result.
    ///
    /// # Errors
    /// If the prompt is empty, or a kernel or a peer fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        window: usize,
        end: Option<u32>,
        sampling: &Sampling,
    ) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            return Err(Error::config("the prompt has no tokens; give it at least one character"));
        }
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let seen = &tokens[tokens.len().saturating_sub(window)..];
            let logits = self.next_logits(seen)?;
            let drawn = logits.map_or(0, |logits| sample(&logits, sampling, tokens.len()) as u32);
            let next = Tensor::from_vec(vec![drawn], 1, &Device::Cpu)?.to_device(&self.device)?;
            self.pp.broadcast(&next, self.pp.size() - 1)?.wait()?;
            let next = next.to_vec1::<u32>()?[0];
            if Some(next) == end {
                break;
            }
            tokens.push(next);
        }
        Ok(tokens.split_off(prompt.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_follows_the_distribution_and_the_seed() {
        let logits = [0.0f32, 1.0, 2.0];
        let sampling = Sampling { temperature: 1.0, top_k: 0, seed: 3 };
        let mut counts = [0usize; 3];
        for position in 0..20_000 {
            let drawn = sample(&logits, &sampling, position);
            assert_eq!(drawn, sample(&logits, &sampling, position));
            counts[drawn] += 1;
        }
        let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            let expected = f64::from(logit).exp() / total;
            assert!((*count as f64 / 20_000.0 - expected).abs() < 0.015, "{counts:?}");
        }
        assert_eq!(sample(&logits, &Sampling { temperature: 0.0, ..sampling }, 5), 2);
        assert_eq!(sample(&logits, &Sampling { top_k: 1, ..sampling }, 5), 2);
    }
}
