//! Token embedding split over tp by vocabulary, plus learned positions, and in some models a
//! normalization (Shoeybi et al. 2019 §3; Radford et al. 2019; Le Scao et al. 2022).

use candle_core::Tensor;
use kernels::ops::dropout::{bias_dropout_add, dropout_backward};
use kernels::ops::norm::NormStats;
use kernels::tensor::constants::constant;
use kernels::tensor::device::upload;

use super::context::{Ctx, DropoutSite};
use super::layer::{Input, Saved};
use super::layout::{Partial, Stream};
use super::norm::{Norm, NormSpec};
use crate::Result;
use crate::params::{Init, ParamId, ParamSpec, ParamsBuilder, Partition};

/// The vocabulary of a model; the embedding and the head both use it.
#[derive(Clone, Debug)]
pub struct VocabSpec {
    /// Tokens, without padding.
    pub vocab_size: usize,
    /// Vocabulary size, padded with zero rows to a multiple of divisor · tp.
    pub padded: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Standard deviation of the initial weights.
    pub init_std: f64,
    /// Whether the output matrix is the token embedding.
    pub tied: bool,
    /// Number of ranks that rows are split over.
    pub tp: usize,
}

impl VocabSpec {
    /// The token embedding. If `tied`, it is also the output matrix.
    pub fn embedding_param(&self) -> ParamSpec {
        ParamSpec {
            name: "embedding.word_embeddings.weight".into(),
            shape: vec![self.vocab_size, self.hidden],
            partition: Partition::Split { dim: 0, parts: 1 },
            padded_dim0: self.padded,
            init: Init::Normal { std: self.init_std },
            weight_decay: true,
            tie_group: self.tied.then(|| "word_embeddings".into()),
            grad_partial_over_tp: false,
        }
    }

    /// First vocabulary row of tp rank `rank`.
    pub fn first_row(&self, rank: usize) -> usize {
        rank * (self.padded / self.tp)
    }

    /// Number of rows of tp rank `rank` that are not padding.
    pub fn valid_rows(&self, rank: usize) -> usize {
        self.vocab_size.saturating_sub(self.first_row(rank)).min(self.padded / self.tp)
    }
}

/// The first layer of a model.
pub struct Embedding {
    word: ParamId,
    /// `[max positions, h]`
    position: Option<ParamId>,
    norm: Option<Norm>,
    spec: VocabSpec,
    dropout: f64,
}

/// Values for backward: the normalization's input and statistics, if there is a normalization.
type SavedEmbedding = Option<(Stream, NormStats)>;

impl Embedding {
    /// `positions`: rows of the learned position embedding, if the model has one. `norm`: the
    /// normalization of the sum, if the model has one.
    pub fn declare(
        spec: &VocabSpec,
        positions: Option<usize>,
        norm: Option<&NormSpec>,
        dropout: f64,
        sequence_parallel: bool,
        params: &mut ParamsBuilder,
    ) -> Self {
        let word = params.declare(spec.embedding_param());
        let position = positions.map(|rows| {
            params.declare(ParamSpec {
                name: "embedding.position_embeddings.weight".into(),
                shape: vec![rows, spec.hidden],
                partition: Partition::Replicated,
                padded_dim0: rows,
                init: Init::Normal { std: spec.init_std },
                weight_decay: true,
                tie_group: None,
                grad_partial_over_tp: sequence_parallel,
            })
        });
        let norm = norm.map(|norm| Norm::declare("embedding.layernorm", norm, params));
        Self { word, position, norm, spec: spec.clone(), dropout }
    }

    /// u32 `[rows of the residual stream, b]`: the position of each token.
    fn positions(&self, ctx: &Ctx) -> Result<Tensor> {
        let (rows, batch) = (ctx.stream_positions()?, ctx.tokens.dim(1)?);
        if let Some(positions) = &ctx.documents.positions {
            return Ok(positions.narrow(0, rows.start, rows.len())?);
        }
        let shape = (rows.len(), batch);
        let ids: Vec<u32> = rows.flat_map(|p| std::iter::repeat_n(p as u32, batch)).collect();
        Ok(constant(ids, shape, ctx.tokens.device())?)
    }

    fn embed(&self, positions: &Tensor, ctx: &Ctx) -> Result<(Stream, SavedEmbedding)> {
        let first = self.spec.first_row(ctx.tp.rank());
        let local = kernels::ops::embedding::embedding(ctx.tokens, &ctx.weight(self.word)?, first)?;
        let x = ctx.tp.exit(Partial(local))?;
        if let Some(position) = self.position {
            let rows = kernels::ops::embedding::embedding(positions, &ctx.weight(position)?, 0)?;
            kernels::ops::reduce::add_inplace(&x.0, &rows)?;
        }
        let (x, saved) = match &self.norm {
            Some(norm) => {
                let (y, stats) = norm.forward(&x, ctx)?;
                (y, Some((x, stats)))
            }
            None => (x, None),
        };
        let x = match ctx.stream_dropout(self.dropout, 0, DropoutSite::Embedding)? {
            Some(dropout) => Stream(bias_dropout_add(&x.0, None, None, Some(&dropout))?),
            None => x,
        };
        Ok((x, saved))
    }
}

impl Input for Embedding {
    /// From tokens to the residual stream.
    fn forward(&self, ctx: &Ctx) -> Result<(Stream, Saved)> {
        let (x, saved) = self.embed(&self.positions(ctx)?, ctx)?;
        Ok((x, Saved::new(saved)))
    }

    /// Accumulates the gradients of the embeddings.
    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<()> {
        let saved: SavedEmbedding = saved.take()?;
        let dy = match ctx.stream_dropout(self.dropout, 0, DropoutSite::Embedding)? {
            Some(dropout) => Stream(dropout_backward(&dy.0, &dropout)?),
            None => dy,
        };
        let dx = match (&self.norm, &saved) {
            (Some(norm), Some((x, stats))) => norm.backward(&dy, x, stats, ctx)?,
            _ => dy,
        };
        if let Some(position) = self.position {
            kernels::ops::embedding::embedding_backward(
                &dx.0,
                &self.positions(ctx)?,
                0,
                &ctx.params.grad(position)?,
            )?;
        }
        let whole = ctx.tp.exit_backward(&dx)?;
        let first = self.spec.first_row(ctx.tp.rank());
        ctx.params.add_embedding_grad(self.word, &whole.0, ctx.tokens, first)
    }

    fn params(&self) -> Vec<ParamId> {
        let norm = self.norm.as_ref().map(Norm::params).into_iter().flatten();
        [self.word].into_iter().chain(self.position).chain(norm).collect()
    }

    /// Those of the norm: tables are only added to.
    fn weights_in_backward(&self) -> Vec<ParamId> {
        self.norm.as_ref().map(Norm::params).into_iter().flatten().collect()
    }

    /// Runs without sequence parallelism.
    fn decode(&self, starts: &[usize], ctx: &Ctx) -> Result<Stream> {
        let (seq, batch) = ctx.tokens.dims2()?;
        let ids: Vec<u32> =
            (0..seq).flat_map(|i| starts.iter().map(move |start| (start + i) as u32)).collect();
        let positions = upload(ids, (seq, batch), ctx.tokens.device())?;
        Ok(self.embed(&positions, ctx)?.0)
    }
}
