//! Copies through pinned host memory.

use crate::support::runs;
use candle_core::{DType, Device, Tensor};
use kernels::ops::reduce::scale_inplace;
use kernels::tensor::constants::constant;
use kernels::tensor::device::{empty, to_host, upload, zeros};
use kernels::tensor::transfer::{fetch, mark, put, room};

fn values(t: &Tensor) -> Vec<f32> {
    t.to_device(&Device::Cpu)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

#[test]
fn views_are_fetched_and_put_where_they_lie() {
    for dtype in [DType::F32, DType::BF16, DType::U32] {
        for (run, got) in runs(|device| {
            let all = Tensor::arange(0u32, 100, device).unwrap().to_dtype(dtype).unwrap();
            let part = all.narrow(0, 13, 40).unwrap().reshape((8, 5)).unwrap();
            // Twice, so that memory is reused the second time.
            for _ in 0..2 {
                // Before the mark, because copies wait for the mark. Otherwise the zeros might or
                // might not come after the copy.
                let other = Tensor::zeros(40, dtype, device).unwrap();
                let here = mark(device).unwrap().unwrap();
                let staged = fetch(&part, &here).unwrap();
                assert_eq!((staged.tensor().dims(), staged.tensor().dtype()), (&[8, 5][..], dtype));
                assert_eq!(values(staged.tensor()), (13..53).map(|v| v as f32).collect::<Vec<_>>());
                put(staged, &other, &here).unwrap();
                assert_eq!(values(&other), values(&part));
            }
            let here = mark(device).unwrap().unwrap();
            let filled = room(&part, &here).unwrap();
            filled
                .tensor()
                .slice_set(&Tensor::ones((8, 5), dtype, &Device::Cpu).unwrap(), 0, 0)
                .unwrap();
            put(filled, &part, &here).unwrap();
            values(&all)
        }) {
            let want: Vec<f32> =
                (0..100).map(|v| if (13..53).contains(&v) { 1.0 } else { v as f32 }).collect();
            assert_eq!(got, want, "{dtype:?}, {run}");
        }
    }
}

#[test]
fn what_is_queued_after_a_put_sees_it_and_what_is_staged_is_kept_until_then() {
    for (run, got) in runs(|device| {
        let t = Tensor::zeros(1 << 20, DType::F32, device).unwrap();
        // Several blocks are in flight at a time.
        for step in 0..8 {
            let here = mark(device).unwrap().unwrap();
            let staged = room(&t, &here).unwrap();
            let ones = Tensor::full(step as f32, t.dims(), &Device::Cpu).unwrap();
            staged.tensor().slice_set(&ones, 0, 0).unwrap();
            put(staged, &t, &here).unwrap();
            scale_inplace(&t, 2.0).unwrap();
        }
        to_host(&t).unwrap().to_vec1::<f32>().unwrap()
    }) {
        assert!(got.iter().all(|v| *v == 14.0), "{run}");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    for (run, ()) in runs(|device| {
        let here = mark(device).unwrap().unwrap();
        let t = Tensor::zeros((4, 6), DType::F32, device).unwrap();
        fetch(&t.t().unwrap(), &here).map(drop).unwrap_err();
        put(fetch(&t, &here).unwrap(), &Tensor::zeros(23, DType::F32, device).unwrap(), &here)
            .unwrap_err();
        put(fetch(&t, &here).unwrap(), &Tensor::zeros(24, DType::BF16, device).unwrap(), &here)
            .unwrap_err();
    }) {
        assert!(!run.is_empty());
    }
    assert!(mark(&Device::Cpu).unwrap().is_none());
}

#[test]
fn values_are_uploaded_in_the_streams_order_and_constants_found_again() {
    for (run, ()) in runs(|device| {
        for round in 0..5u32 {
            let list: Vec<u32> = (0..1000).map(|i| i * round).collect();
            let t = upload(list.clone(), (10, 100), device).unwrap();
            assert_eq!(
                (t.dims(), to_host(&t.flatten_all().unwrap()).unwrap().to_vec1().unwrap()),
                (&[10, 100][..], list)
            );
            let constants = [0, 1].map(|_| constant(vec![round, 7, 8, 9], (2, 2), device).unwrap());
            assert!(kernels::tensor::device::same_elements(&constants[0], &constants[1]));
            let other = constant(vec![round, 7, 8, 10], (2, 2), device).unwrap();
            assert!(!kernels::tensor::device::same_elements(&constants[0], &other));
            assert_eq!(to_host(&other).unwrap().to_vec2::<u32>().unwrap(), [[round, 7], [8, 10]]);
        }
        upload(vec![1f32; 5], 6, device).unwrap_err();
        assert_eq!(values(&zeros("test", (3, 3), DType::BF16, device).unwrap()), [0.0; 9]);
        assert_eq!(empty((3, 3), DType::F32, device).unwrap().dims(), [3, 3]);
    }) {
        assert!(!run.is_empty());
    }
}
