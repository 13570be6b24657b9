//! Embedding lookup compared with candle's, on one rank and split over ranks.

use crate::common::{
    DTYPES, assert_close, assert_same_on_any_threads, bits, cast, ids, oracle, randn,
};
use candle_core::{DType, Device, Tensor};
use kernels::ops::embedding::{embedding, embedding_backward};

#[test]
fn lookup_and_its_gradient_agree_with_autograd() {
    let (w, ids, dy) = (randn("w", &[11, 7]), ids("ids", &[9, 4], 11), randn("dy", &[9, 4, 7]));
    let (y, grads) = oracle(&[&w], &dy, |t| {
        t[0].index_select(&ids.flatten_all().unwrap(), 0).unwrap().reshape((9, 4, 7)).unwrap()
    });
    for (dtype, tolerance) in DTYPES {
        let (w, dy) = (cast(&w, dtype), cast(&dy, dtype));
        let dw = w.zeros_like().unwrap();
        embedding_backward(&dy, &ids, 0, &dw).unwrap();
        assert_close("y", &embedding(&ids, &w, 0).unwrap(), &y, tolerance);
        assert_close("dw", &dw, &grads[0], tolerance);
    }
}

#[test]
fn the_parts_of_a_cut_vocabulary_add_up_to_the_whole() {
    let (w, ids, dy) = (randn("w", &[12, 5]), ids("ids", &[8, 3], 12), randn("dy", &[8, 3, 5]));
    let whole = embedding(&ids, &w, 0).unwrap();
    let dw = w.zeros_like().unwrap();
    embedding_backward(&dy, &ids, 0, &dw).unwrap();
    let mut sum = whole.zeros_like().unwrap();
    for first in [0, 4, 8] {
        let part = w.narrow(0, first, 4).unwrap();
        sum = (sum + embedding(&ids, &part, first).unwrap()).unwrap();
        let dpart = Tensor::zeros((4, 5), DType::F64, &Device::Cpu).unwrap();
        embedding_backward(&dy, &ids, first, &dpart).unwrap();
        assert_eq!(bits(&dpart), bits(&dw.narrow(0, first, 4).unwrap()));
    }
    assert_eq!(bits(&sum), bits(&whole));
}

#[test]
fn gradients_accumulate() {
    let (ids, dy) = (ids("ids", &[6], 3), randn("dy", &[6, 2]));
    let (once, twice) =
        (Tensor::zeros((3, 2), DType::F64, &Device::Cpu).unwrap(), randn("start", &[3, 2]));
    let start = twice.copy().unwrap();
    embedding_backward(&dy, &ids, 0, &once).unwrap();
    embedding_backward(&dy, &ids, 0, &twice).unwrap();
    assert_close("dw", &twice, &(start + once).unwrap(), 1e-14);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (ids, dy) = (ids("ids", &[500, 2], 77), cast(&randn("dy", &[500, 2, 50]), DType::F32));
    let w = cast(&randn("w", &[77, 50]), DType::F32);
    assert_same_on_any_threads(|| {
        let dw = w.zeros_like().unwrap();
        embedding_backward(&dy, &ids, 0, &dw).unwrap();
        vec![embedding(&ids, &w, 0).unwrap(), dw]
    });
}

#[test]
fn wrong_dtypes_and_shapes_are_errors() {
    let (ids, w) = (ids("ids", &[3], 4), randn("w", &[4, 2]));
    assert!(embedding(&cast(&ids, DType::I64), &w, 0).unwrap_err().to_string().contains("I64"));
    let message = embedding_backward(&randn("dy", &[3, 3]), &ids, 0, &w).unwrap_err().to_string();
    assert!(message.contains("[3, 3]") && message.contains("[3, 2]"), "{message}");
}
