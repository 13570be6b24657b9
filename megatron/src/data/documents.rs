//! Documents within samples: where they end, and what that changes in a sample.
//!
//! Source: Megatron-LM `megatron/core/datasets/gpt_dataset.py`, `_get_ltor_masks_and_position_ids`:
//! the token that ends a document belongs to it; the next token is the first of the next document.

use candle_core::{Device, Tensor};
use kernels::tensor::device::upload;

use crate::Result;

/// The end-of-document token, and its effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentEnds {
    /// Its id.
    pub token: u32,
    /// The loss at the token itself does not count, because the next document cannot be predicted
    /// (`eod_mask_loss`).
    pub mask_loss: bool,
    /// Positions restart at 0 after it (`reset_position_ids`).
    pub reset_positions: bool,
    /// Tokens after it do not attend to tokens before (`reset_attention_mask`).
    pub reset_attention: bool,
}

/// The effect of a microbatch's documents on the layers. The default has none.
#[derive(Clone, Debug, Default)]
pub struct Documents {
    /// u32 `[s, b]`: the position of every token within its document; `None`: its position within
    /// the sample.
    pub positions: Option<Tensor>,
    /// u32 `[b, s]`: the position in the sample of the first token that each token attends to;
    /// `None`: the sample's first.
    pub first_keys: Option<Tensor>,
}

impl Documents {
    /// The existing tables, always in the same order.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &Tensor> {
        self.positions.iter().chain(&self.first_keys)
    }

    /// Applies `f` to the existing tables.
    ///
    /// # Errors
    /// Those of `f`.
    pub(crate) fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let table = |table: &Option<Tensor>| table.as_ref().map(&f).transpose();
        Ok(Self { positions: table(&self.positions)?, first_keys: table(&self.first_keys)? })
    }
}

/// Builds [`Documents`]: `[s][b]` and `[b][s]`.
pub(super) struct Tables {
    positions: Option<Vec<u32>>,
    first_keys: Option<Vec<u32>>,
}

impl Tables {
    /// Tables for a microbatch of `b` samples of `s` tokens, to be filled by [`add`](Self::add).
    pub(super) fn new(ends: Option<DocumentEnds>, s: usize, b: usize) -> Self {
        let room = |needed: fn(&DocumentEnds) -> bool| {
            ends.as_ref().filter(|ends| needed(ends)).map(|_| vec![0; s * b])
        };
        Self {
            positions: room(|ends| ends.reset_positions),
            first_keys: room(|ends| ends.reset_attention),
        }
    }

    /// Finds the documents of sample `column` of `b` with the inputs `tokens`.
    pub(super) fn add(&mut self, ends: DocumentEnds, tokens: &[u32], column: usize, b: usize) {
        let mut first = 0;
        for (position, &token) in tokens.iter().enumerate() {
            if let Some(positions) = &mut self.positions {
                positions[position * b + column] = (position - first) as u32;
            }
            if let Some(first_keys) = &mut self.first_keys {
                first_keys[column * tokens.len() + position] = first as u32;
            }
            if token == ends.token {
                first = position + 1;
            }
        }
    }

    /// Uploads the tables to the device of the layers.
    pub(super) fn upload(self, s: usize, b: usize, device: &Device) -> Result<Documents> {
        let tensor = |table: Option<Vec<u32>>, shape| {
            table.map(|table| upload(table, shape, device)).transpose()
        };
        Ok(Documents {
            positions: tensor(self.positions, (s, b))?,
            first_keys: tensor(self.first_keys, (b, s))?,
        })
    }
}
