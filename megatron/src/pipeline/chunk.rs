//! One virtual stage: consecutive layers, plus the input and the output at the ends of the model.
//!
//! Full recompute (Chen et al. 2016) saves only the input of a segment of layers. Backward runs the
//! segment forward again, up to the last layer's activations.

use std::ops::Range;

use candle_core::Tensor;
use kernels::tensor::trace::{Kind, Part, timed};

use super::saved_inputs::{SavedInput, SavedInputs};
use crate::config::Recompute;
use crate::params::{ParamId, UnitWindow};
use crate::tensor_parallel::layout::Stream;
use crate::tensor_parallel::{Ctx, Input, Layer, Output, Phase, Saved};
use crate::{Error, Result};

/// The layers of one virtual stage.
pub struct Chunk {
    /// Present on the first virtual stage.
    pub input: Option<Box<dyn Input>>,
    /// In forward order.
    pub layers: Vec<Box<dyn Layer>>,
    /// Present on the last virtual stage.
    pub output: Option<Box<dyn Output>>,
    /// The parts of the layers that backward recomputes.
    pub recompute: Recompute,
}

/// The result of a forward pass through a chunk.
pub enum ChunkOutput {
    /// The residual stream, for the next stage.
    Stream(Tensor),
    /// Σ of the microbatch's unmasked losses: f64 `[1]`, on the stage's device.
    Loss(Tensor),
}

enum Segment {
    /// Every layer's activations.
    Kept(Vec<Saved>),
    /// The segment's input; the rest is recomputed.
    Input(SavedInput),
}

/// The values for backward.
pub struct SavedChunk {
    input: Option<Saved>,
    segments: Vec<(Range<usize>, Segment)>,
    output: Option<Saved>,
}

impl Chunk {
    /// The parameters of each unit, in forward order. What is sharded is gathered and reduced by
    /// unit.
    pub fn units(&self) -> impl Iterator<Item = Vec<ParamId>> + '_ {
        let input = self.input.iter().map(|input| input.params());
        let output = self.output.iter().map(|output| output.params());
        input.chain(self.layers.iter().map(|layer| layer.params())).chain(output)
    }

    /// The parameters that each step of backward reads, in its order.
    fn units_in_backward(&self, segments: &[(Range<usize>, Segment)]) -> Vec<Vec<ParamId>> {
        let mut units: Vec<_> = self.output.iter().map(|o| o.weights_in_backward()).collect();
        let of = |layers: Range<usize>| self.layers[layers].iter().map(|layer| layer.params());
        for (layers, segment) in segments.iter().rev() {
            if matches!(segment, Segment::Input(_)) {
                units.extend(of(layers.clone()));
            }
            units.extend(of(layers.clone()).rev());
        }
        units.extend(self.input.iter().map(|input| input.weights_in_backward()));
        units
    }

    fn run(
        &self,
        layers: Range<usize>,
        mut x: Stream,
        ctx: &Ctx,
        units: &mut UnitWindow,
    ) -> Result<(Stream, Vec<Saved>)> {
        let mut all = Vec::with_capacity(layers.len());
        for layer in &self.layers[layers] {
            units.advance()?;
            let (y, saved) = layer.forward(x, ctx)?;
            all.push(saved);
            x = y;
        }
        Ok((x, all))
    }

    /// Computes what backward of a segment needs, from the segment's input, without the segment's
    /// output.
    fn recompute(
        &self,
        layers: Range<usize>,
        x: Stream,
        ctx: &Ctx,
        units: &mut UnitWindow,
    ) -> Result<Vec<Saved>> {
        let _span = timed("recompute", Kind::Phase, Part::Recompute);
        let Some((last, before)) = self.layers[layers.clone()].split_last() else {
            return Ok(Vec::new());
        };
        let (x, mut all) = self.run(layers.start..layers.start + before.len(), x, ctx, units)?;
        units.advance()?;
        all.push(last.recompute(x, ctx)?);
        Ok(all)
    }

    fn first(
        &self,
        input: Option<Tensor>,
        ctx: &Ctx,
        units: &mut UnitWindow,
    ) -> Result<(Stream, Option<Saved>)> {
        match (&self.input, input) {
            (Some(own), None) => {
                units.advance()?;
                own.forward(ctx).map(|(x, saved)| (x, Some(saved)))
            }
            (None, Some(x)) => Ok((Stream(x), None)),
            _ => Err(Error::config("internal error: a chunk makes its input or is given one")),
        }
    }

    /// The number of inputs that a forward in training saves for recomputation.
    pub(super) fn num_saved_inputs(&self) -> usize {
        self.recompute.num_inputs(self.layers.len())
    }

    /// Runs the chunk forward. `input` is the previous stage's residual stream; `None` on the first
    /// virtual stage. `inputs` keeps what is saved for recomputation.
    ///
    /// # Errors
    /// If a kernel or a collective fails.
    pub fn forward(
        &self,
        input: Option<Tensor>,
        ctx: &Ctx,
        inputs: &SavedInputs,
    ) -> Result<(ChunkOutput, SavedChunk)> {
        let trains = matches!(ctx.phase, Phase::Train { .. });
        let mut units = UnitWindow::new(ctx.params, || self.units().collect());
        let (mut x, input) = self.first(input, ctx, &mut units)?;
        let mut segments = Vec::new();
        for (layers, recompute) in self.recompute.segments(self.layers.len()) {
            let segment = if recompute {
                let leaving = if trains { Some(inputs.leave(&x, ctx.tp)?) } else { None };
                x = self.run(layers.clone(), x, ctx, &mut units)?.0;
                let Some(leaving) = leaving else { continue };
                Segment::Input(inputs.keep(leaving)?)
            } else {
                let (y, saved) = self.run(layers.clone(), x, ctx, &mut units)?;
                x = y;
                Segment::Kept(saved)
            };
            segments.push((layers, segment));
        }
        let (made, output) = match &self.output {
            Some(output) => {
                units.advance()?;
                let _span = timed("output", Kind::Phase, Part::OutputForward);
                let (loss, saved) = output.forward(x, ctx)?;
                (ChunkOutput::Loss(loss), Some(saved))
            }
            None => (ChunkOutput::Stream(x.0), None),
        };
        units.finish()?;
        Ok((made, SavedChunk { input, segments, output }))
    }

    /// Allocates each layer's cache for `positions` tokens of `batch` samples in generation.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn caches(&self, positions: usize, batch: usize, ctx: &Ctx) -> Result<Vec<Tensor>> {
        self.layers.iter().map(|layer| layer.cache(positions, batch, ctx)).collect()
    }

    /// Runs the next tokens of each sample through the chunk; on the last virtual stage, up to the
    /// output's input. Sample i's first token has position `starts[i]`.
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
        let mut units = UnitWindow::new(ctx.params, || self.units().collect());
        let mut x = match (&self.input, input) {
            (Some(own), None) => {
                units.advance()?;
                own.decode(starts, ctx)?
            }
            (None, Some(x)) => Stream(x),
            _ => {
                return Err(Error::config(
                    "internal error: a chunk makes its input or is given one",
                ));
            }
        };
        for (layer, cache) in self.layers.iter().zip(caches) {
            units.advance()?;
            x = layer.decode(x, cache, starts, ctx)?;
        }
        units.finish()?;
        Ok(x)
    }

    /// [`Output::logits_at`], on the last virtual stage.
    ///
    /// # Errors
    /// As there.
    pub fn logits_at(
        &self,
        output: &dyn Output,
        x: &Stream,
        rows: &[usize],
        ctx: &Ctx,
    ) -> Result<Tensor> {
        let mut units = UnitWindow::new(ctx.params, || vec![output.params()]);
        units.advance()?;
        let logits = output.logits_at(x, rows, ctx)?;
        units.finish()?;
        Ok(logits)
    }

    /// Runs the chunk backward. `dy` is the next stage's gradient; `None` on the last virtual
    /// stage. Calls `ready` with parameters as soon as this pass adds nothing more to their
    /// gradients, except the products that it leaves to `ctx.later`. `inputs` is that of forward.
    /// Returns the gradient of the input (`None` on the first virtual stage).
    ///
    /// # Errors
    /// If a kernel or a collective fails.
    pub fn backward(
        &self,
        dy: Option<Tensor>,
        mut saved: SavedChunk,
        ctx: &Ctx,
        inputs: &SavedInputs,
        ready: &mut dyn FnMut(&[ParamId]) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let mut units = UnitWindow::new(ctx.params, || self.units_in_backward(&saved.segments));
        let announce = |next: Option<&mut (Range<usize>, Segment)>| match next {
            Some((_, Segment::Input(input))) => inputs.announce(input),
            _ => Ok(()),
        };
        announce(saved.segments.last_mut())?;
        let mut dx = match (&self.output, saved.output, dy) {
            (Some(output), Some(saved), None) => {
                units.advance()?;
                let span = timed("output", Kind::Phase, Part::OutputBackward);
                let dx = output.backward(saved, ctx)?;
                drop(span);
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
        while let Some((layers, segment)) = saved.segments.pop() {
            announce(saved.segments.last_mut())?;
            let saved = match segment {
                Segment::Kept(saved) => saved,
                Segment::Input(input) => {
                    let x = inputs.bring(input, ctx.tp)?;
                    self.recompute(layers.clone(), x, ctx, &mut units)?
                }
            };
            for (layer, saved) in self.layers[layers].iter().zip(saved).rev() {
                units.advance()?;
                dx = layer.backward(dx, saved, ctx)?;
                ready(&layer.params())?;
            }
        }
        let dx = match (&self.input, saved.input) {
            (Some(input), Some(saved)) => {
                units.advance()?;
                input.backward(dx, saved, ctx)?;
                ready(&input.params())?;
                None
            }
            _ => Some(dx.0),
        };
        units.finish()?;
        Ok(dx)
    }
}
