//! One virtual stage: a run of layers, with the input and the output at the ends of the model.
//!
//! Full recompute (Chen et al. 2016) keeps the input of a segment of layers and runs it forward
//! again in backward, up to the last layer's activations.

use std::ops::Range;

use candle_core::Tensor;

use crate::config::Recompute;
use crate::params::ParamId;
use crate::tensor_parallel::layout::Stream;
use crate::tensor_parallel::{Ctx, Input, Layer, Output, Saved};
use crate::{Error, Result};

/// The layers of one virtual stage.
pub struct Chunk {
    /// On the first virtual stage.
    pub input: Option<Box<dyn Input>>,
    /// In forward order.
    pub layers: Vec<Box<dyn Layer>>,
    /// On the last virtual stage.
    pub output: Option<Box<dyn Output>>,
    /// What of the layers is computed again in backward.
    pub recompute: Recompute,
}

/// What a forward pass through a chunk leaves.
pub enum ChunkOutput {
    /// The residual stream, for the next stage.
    Stream(Tensor),
    /// Σ of the microbatch's losses that count: f64 `[1]`, on the stage's device.
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
    input: Option<Saved>,
    segments: Vec<(Range<usize>, Segment)>,
    output: Option<Saved>,
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

    fn first(&self, input: Option<Tensor>, ctx: &Ctx) -> Result<(Stream, Option<Saved>)> {
        match (&self.input, input) {
            (Some(own), None) => own.forward(ctx).map(|(x, saved)| (x, Some(saved))),
            (None, Some(x)) => Ok((Stream(x), None)),
            _ => Err(Error::config("internal error: a chunk makes its input or is given one")),
        }
    }

    /// Runs the chunk. `input`: the previous stage's residual stream; `None` on the first virtual
    /// stage.
    ///
    /// # Errors
    /// If a kernel or a collective fails.
    pub fn forward(&self, input: Option<Tensor>, ctx: &Ctx) -> Result<(ChunkOutput, SavedChunk)> {
        let (mut x, input) = self.first(input, ctx)?;
        let mut segments = Vec::new();
        for (layers, recompute) in self.recompute.segments(self.layers.len()) {
            let segment = if recompute {
                let kept = x.clone();
                x = self.run(layers.clone(), x, ctx)?.0;
                Segment::Input(kept)
            } else {
                let (y, saved) = self.run(layers.clone(), x, ctx)?;
                x = y;
                Segment::Kept(saved)
            };
            segments.push((layers, segment));
        }
        match &self.output {
            Some(output) => {
                let (loss, saved) = output.forward(x, ctx)?;
                Ok((ChunkOutput::Loss(loss), SavedChunk { input, segments, output: Some(saved) }))
            }
            None => Ok((ChunkOutput::Stream(x.0), SavedChunk { input, segments, output: None })),
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
    /// output's input; sample i's first token has position `starts[i]`.
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
        let mut x = match (&self.input, input) {
            (Some(own), None) => own.decode(starts, ctx)?,
            (None, Some(x)) => Stream(x),
            _ => {
                return Err(Error::config(
                    "internal error: a chunk makes its input or is given one",
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
        let mut dx = match (&self.output, saved.output, dy) {
            (Some(output), Some(saved), None) => {
                let dx = output.backward(saved, ctx)?;
                ready(&output.params())?;
                dx
            }
            (None, None, Some(dy)) => Stream(dy),
            _ => {
                return Err(Error::config(
                    "internal error: a chunk has an output or is given a gradient",
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
        match (&self.input, saved.input) {
            (Some(input), Some(saved)) => {
                input.backward(dx, saved, ctx)?;
                ready(&input.params())?;
                Ok(None)
            }
            _ => Ok(Some(dx.0)),
        }
    }
}
