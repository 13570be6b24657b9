//! Rows of an embedding, and the gradient of its weight.

use crate::support::{Input, check};
use kernels::ops::embedding::{embedding, embedding_backward};

#[test]
fn rows_are_looked_up_and_others_are_zero() {
    for (tokens, rows, h, first) in
        [([1, 1], 3, 1, 0), ([5, 3], 20, 7, 4), ([4, 2], 30, 64, 0), ([3, 2], 9, 264, 10)]
    {
        let inputs = [Input::ids("ids", &tokens, 30), Input::data("weight", &[rows, h])];
        check("embedding", &inputs, |t| Ok(vec![embedding(&t[0], &t[1], first)?]));
    }
}

#[test]
fn gradients_of_rows_sum_in_the_order_of_tokens() {
    // Few tokens; rows with one segment of tokens and with several; all tokens of one row; several
    // tiles of tokens, with a full or partial last tile; rows of other ranks.
    let cases = [
        (1, 3, 3, 8),
        (70, 40, 40, 7),
        (300, 4, 4, 24),
        (64, 1, 1, 5),
        (65, 1, 1, 8),
        (129, 1, 1, 40),
    ];
    for (tokens, vocab, rows, h) in cases.into_iter().chain([
        (5000, 60, 20, 9),
        (4096, 3000, 3000, 4),
        (33, 50, 11, 768),
        (260, 2, 1, 1032),
    ]) {
        let inputs = [
            Input::data("dy", &[tokens, 1, h]),
            Input::ids("ids", &[tokens, 1], vocab),
            Input::wide("dweight", &[rows, h]),
        ];
        let first = if rows < vocab as usize { 1 } else { 0 };
        check("embedding_backward", &inputs, |t| {
            embedding_backward(&t[0], &t[1], first, &t[2])?;
            Ok(vec![t[2].clone()])
        });
    }
}

#[test]
fn no_tokens_are_no_work() {
    check("embedding", &[Input::ids("ids", &[0, 2], 3), Input::data("weight", &[3, 8])], |t| {
        let y = embedding(&t[0], &t[1], 0)?;
        embedding_backward(
            &y,
            &t[0],
            0,
            &t[1].to_dtype(y.dtype())?.zeros_like()?.to_dtype(wide(y.dtype()))?,
        )?;
        Ok(vec![y])
    });
}

fn wide(dtype: candle_core::DType) -> candle_core::DType {
    if dtype == candle_core::DType::F64 { dtype } else { candle_core::DType::F32 }
}
