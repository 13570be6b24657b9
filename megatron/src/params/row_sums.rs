//! The gradient of an embedding whose matrix is also used by another layer. Only the rows that a
//! step's tokens name have sums. These sums are kept apart from the gradient of the other use and
//! are added to it once.
//!
//! The order of summation thus equals that of a pipeline whose first and last stage hold one copy
//! each. The cost is memory for the named rows instead of a second gradient of the matrix.

use candle_core::{Device, Tensor};
use kernels::ops::embedding::embedding_backward;
use kernels::tensor::device::zeros;
use kernels::tensor::host::with_slice;

use crate::Result;

/// Marks "no place" and "no row"; larger than any valid place or row.
const NONE: u32 = u32::MAX;
/// Minimum number of rows to allocate.
const LEAST: usize = 256;

/// Sums of some rows of a matrix on a CPU.
#[derive(Debug, Default)]
pub(super) struct RowSums {
    /// For each row of the matrix, the index of its sum.
    places: Vec<u32>,
    /// For each sum, its row in the matrix.
    rows: Vec<u32>,
    /// `[room, columns]`; zeros from row `rows.len()` on.
    sums: Option<Tensor>,
}

impl RowSums {
    /// Forgets all sums.
    ///
    /// # Errors
    /// If the buffer cannot be written.
    pub fn clear(&mut self) -> Result<()> {
        if let Some(sums) = &self.sums {
            kernels::ops::reduce::zero(&sums.narrow(0, 0, self.rows.len())?)?;
        }
        for row in self.rows.drain(..) {
            self.places[row as usize] = NONE;
        }
        Ok(())
    }

    /// As [`embedding_backward`], for the matrix with the gradient `like`.
    ///
    /// # Errors
    /// As [`embedding_backward`].
    pub fn add(
        &mut self,
        dy: &Tensor,
        ids: &Tensor,
        first_row: usize,
        like: &Tensor,
    ) -> Result<()> {
        let (rows, columns) = like.dims2()?;
        self.places.resize(rows, NONE);
        let places = with_slice::<u32, _>(ids, "embedding_backward", |ids| {
            Ok(ids.iter().map(|&id| self.place(id, first_row)).collect::<Vec<_>>())
        })?;
        let room = self.sums.as_ref().map_or(0, |sums| sums.dims()[0]);
        if self.rows.len() > room {
            let wanted = self.rows.len().max(2 * room).max(LEAST).min(rows.max(1));
            let larger = zeros("main gradients", (wanted, columns), like.dtype(), like.device())?;
            if let Some(sums) = &self.sums {
                kernels::ops::reduce::copy(&larger.narrow(0, 0, room)?, sums)?;
            }
            self.sums = Some(larger);
        }
        let Some(sums) = &self.sums else { return Ok(()) };
        let places = Tensor::from_vec(places, ids.shape(), &Device::Cpu)?;
        Ok(embedding_backward(dy, &places, 0, sums)?)
    }

    /// The index of the sum for the row of an id. Returns [`NONE`] if the matrix does not have that
    /// row.
    fn place(&mut self, id: u32, first_row: usize) -> u32 {
        let Some(place) =
            (id as usize).checked_sub(first_row).and_then(|row| self.places.get_mut(row))
        else {
            return NONE;
        };
        if *place == NONE {
            *place = self.rows.len() as u32;
            self.rows.push(id - first_row as u32);
        }
        *place
    }

    /// Adds the sums to the rows of the matrix's gradient.
    ///
    /// # Errors
    /// If the gradient cannot be written.
    pub fn add_to(&self, grad: &Tensor) -> Result<()> {
        let (Some(sums), n) = (&self.sums, self.rows.len()) else { return Ok(()) };
        if n == 0 {
            return Ok(());
        }
        let rows = Tensor::from_slice(&self.rows, n, &Device::Cpu)?;
        Ok(embedding_backward(&sums.narrow(0, 0, n)?, &rows, 0, grad)?)
    }

    /// Number of allocated elements.
    pub fn room(&self) -> usize {
        self.sums.as_ref().map_or(0, Tensor::elem_count)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    /// A matrix with more rows than the first allocation holds, and ids before and after its range.
    #[test]
    fn they_are_the_sums_of_a_whole_matrix() {
        let (rows, first, columns) = (3 * LEAST, 5, 7);
        let zero = || Tensor::zeros((rows, columns), DType::F32, &Device::Cpu).unwrap();
        let mut sums = RowSums::default();
        for step in 0..3u32 {
            sums.clear().unwrap();
            let whole = zero();
            for batch in 0..4u32 {
                let id = |i: u32| (i * i + 37 * i + step) % (rows as u32 / (4 - batch) + 9);
                let ids: Vec<u32> = (0..400).map(id).collect();
                let ids = Tensor::from_vec(ids, (40, 10), &Device::Cpu).unwrap();
                let dy = Tensor::randn(0f32, 1.0, (40, 10, columns), &Device::Cpu).unwrap();
                embedding_backward(&dy, &ids, first, &whole).unwrap();
                sums.add(&dy, &ids, first, &whole).unwrap();
            }
            assert!(sums.rows.len() > LEAST && sums.room() <= rows * columns);
            let got = zero();
            sums.add_to(&got).unwrap();
            let bits = |t: &Tensor| -> Vec<u32> {
                t.flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
                    .into_iter()
                    .map(f32::to_bits)
                    .collect()
            };
            assert_eq!(bits(&got), bits(&whole));
        }
    }
}
