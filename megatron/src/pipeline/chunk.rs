//! One virtual stage: a run of layers, with the embedding and the head at the ends of the model.
//!
//! Full recompute (Chen et al. 2016) keeps the input of a segment of layers and runs it forward
//! again in backward, up to the last layer's activations.

use std::ops::Range;

use candle_core::Tensor;

use crate::config::Recompute;
use crate::params::ParamId;
use crate::tensor_parallel::layout::Stream;
use crate::tensor_parallel::{Ctx, Embedding, Head, Layer, Saved, SavedEmbedding, SavedHead};
use crate::{Error, Result};

/// The layers of one virtual stage.
pub struct Chunk {
    /// On the first virtual stage.
    pub embedding: Option<Embedding>,
    pub layers: Vec<Box<dyn Layer>>,
    /// On the last virtual stage.
    pub head: Option<Head>,
    pub recompute: Recompute,
}

/// What a forward pass through a chunk leaves.
pub enum ChunkOutput {
    /// The residual stream, for the next stage.
    Stream(Tensor),
    /// Σ of the microbatch's unmasked token losses: f64 `[1]`, on the stage's device.
    Loss(Tensor),
}

enum Segment {
    /// Every layer's activations.
    Kept(Vec<Saved>),
    /// The segment's input; the rest is computed again.
    Input(Stream),
}

/// What backward needs.
pub struct SavedChunk {
    embedding: Option<SavedEmbedding>,
    segments: Vec<(Range<usize>, Segment)>,
    head: Option<SavedHead>,
}

impl Chunk {
    fn run(&self, layers: Range<usize>, mut x: Stream, ctx: &Ctx) -> Result<(Stream, Vec<Saved>)> {
        let mut all = Vec::with_capacity(layers.len());
        for layer in &self.layers[layers] {
            let (y, saved) = layer.forward(x, ctx)?;
            all.push(saved);
            x = y;
        }
        Ok((x, all))
    }

    /// What backward of a segment of layers needs, from its input. Its output is not made again.
    fn recompute(&self, layers: Range<usize>, x: Stream, ctx: &Ctx) -> Result<Vec<Saved>> {
        let Some((last, before)) = self.layers[layers.clone()].split_last() else {
            return Ok(Vec::new());
        };
        let (x, mut all) = self.run(layers.start..layers.start + before.len(), x, ctx)?;
        all.push(last.recompute(x, ctx)?);
        Ok(all)
    }

    fn first(&self, input: Option<Tensor>, ctx: &Ctx) -> Result<(Stream, Option<SavedEmbedding>)> {
        match (&self.embedding, input) {
            (Some(embedding), None) => embedding.forward(ctx).map(|(x, saved)| (x, Some(saved))),
            (None, Some(x)) => Ok((Stream(x), None)),
            _ => Err(Error::config("internal error: a chunk has either an embedding or an input")),
        }
    }

    /// Runs the chunk. `input`: the previous stage's residual stream; `None` on the first virtual
    /// stage.
    ///
    /// # Errors
    /// If a kernel or a collective fails.
    pub fn forward(&self, input: Option<Tensor>, ctx: &Ctx) -> Result<(ChunkOutput, SavedChunk)> {
        let (mut x, embedding) = self.first(input, ctx)?;
        let mut segments = Vec::new();
        for (layers, recompute) in self.recompute.segments(self.layers.len()) {
            let segment = if recompute {
                let input = x.clone();
                x = self.run(layers.clone(), x, ctx)?.0;
                Segment::Input(input)
            } else {
                let (y, saved) = self.run(layers.clone(), x, ctx)?;
                x = y;
                Segment::Kept(saved)
            };
            segments.push((layers, segment));
        }
        match &self.head {
            Some(head) => {
                let saved = head.forward(x, ctx)?;
                Ok((
                    ChunkOutput::Loss(saved.loss_sum().clone()),
                    SavedChunk { embedding, segments, head: Some(saved) },
                ))
            }
            None => Ok((ChunkOutput::Stream(x.0), SavedChunk { embedding, segments, head: None })),
        }
    }

    /// Room for what each layer remembers of `positions` tokens of `batch` samples while
    /// generating.
    ///
    /// # Errors
    /// If memory does not suffice.
    pub fn caches(&self, positions: usize, batch: usize, ctx: &Ctx) -> Result<Vec<Tensor>> {
        self.layers.iter().map(|layer| layer.cache(positions, batch, ctx)).collect()
    }

    /// Runs the next tokens of each sample through the chunk, on the last virtual stage up to the
    /// head's input; sample i's first token has position `starts[i]`.
    ///
    /// # Errors
    /// If a kernel or a collective fails.
    pub fn decode(
        &self,
        input: Option<Tensor>,
        caches: &[Tensor],
        starts: &[usize],
        ctx: &Ctx,
    ) -> Result<Stream> {
        let mut x = match (&self.embedding, input) {
            (Some(embedding), None) => embedding.decode(starts, ctx)?,
            (None, Some(x)) => Stream(x),
            _ => {
                return Err(Error::config(
                    "internal error: a chunk has either an embedding or an input",
                ));
            }
        };
        for (layer, cache) in self.layers.iter().zip(caches) {
            x = layer.decode(x, cache, starts, ctx)?;
        }
        Ok(x)
    }

    /// Runs the chunk backward. `dy`: the next stage's gradient; `None` on the last virtual stage.
    /// `ready` learns of parameters as soon as this pass adds nothing more to their gradients,
    /// except what it leaves to `ctx.later`. Returns the gradient of the input (`None` on the first
    /// virtual stage).
    ///
    /// # Errors
    /// If a kernel or a collective fails.
    pub fn backward(
        &self,
        dy: Option<Tensor>,
        saved: SavedChunk,
        ctx: &Ctx,
        ready: &mut dyn FnMut(&[ParamId]) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let mut dx = match (&self.head, saved.head, dy) {
            (Some(head), Some(saved), None) => {
                let dx = head.backward(saved)?;
                ready(&head.params().collect::<Vec<_>>())?;
                dx
            }
            (None, None, Some(dy)) => Stream(dy),
            _ => {
                return Err(Error::config(
                    "internal error: a chunk has either a head or an output gradient",
                ));
            }
        };
        for (layers, segment) in saved.segments.into_iter().rev() {
            let saved = match segment {
                Segment::Kept(saved) => saved,
                Segment::Input(x) => self.recompute(layers.clone(), x, ctx)?,
            };
            for (layer, saved) in self.layers[layers].iter().zip(saved).rev() {
                dx = layer.backward(dx, saved, ctx)?;
                ready(&layer.params())?;
            }
        }
        match (&self.embedding, saved.embedding) {
            (Some(embedding), Some(saved)) => {
                embedding.backward(dx, saved, ctx)?;
                ready(&embedding.params().collect::<Vec<_>>())?;
                Ok(None)
            }
            _ => Ok(Some(dx.0)),
        }
    }
}
