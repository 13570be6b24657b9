//! Graphs: work that is recorded once and launched again.

use candle_core::{DType, Device, Tensor};
use kernels::Error;
use kernels::ops::activation::gelu;
use kernels::ops::embedding::embedding;
use kernels::ops::reduce::{add_inplace, copy, scale_inplace};
use kernels::tensor::constants::constant;
use kernels::tensor::device::{Choice, to_host, upload};
use kernels::tensor::graph::record;

fn gpu() -> Device {
    Choice::Cuda(Some(0)).open(0).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    to_host(t).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn tensor(values: &[f32], device: &Device) -> Tensor {
    upload(values.to_vec(), values.len(), device).unwrap()
}

#[test]
fn each_launch_computes_anew_from_what_its_inputs_hold_by_then() {
    let device = gpu();
    let (x, sum) = (tensor(&[0.0; 300], &device), tensor(&[0.0; 300], &device));
    let body = || add_inplace(&sum, &gelu(&gelu(&x)?)?);
    body().unwrap();
    let graph = record(&device, body).unwrap();
    assert!(graph.num_operations() >= 3);
    scale_inplace(&sum, 0.0).unwrap();
    let want = tensor(&[0.0; 300], &device);
    for step in 1..5 {
        let input: Vec<f32> = (0..300).map(|i| (i * step) as f32 / 100.0).collect();
        let input = tensor(&input, &device);
        copy(&x, &input).unwrap();
        graph.launch().unwrap();
        add_inplace(&want, &gelu(&gelu(&input).unwrap()).unwrap()).unwrap();
        assert_eq!(values(&sum), values(&want), "launch {step}");
    }
}

#[test]
fn nothing_is_computed_while_it_is_recorded() {
    let device = gpu();
    let x = tensor(&[1.0; 10], &device);
    scale_inplace(&x, 1.0).unwrap();
    let graph = record(&device, || scale_inplace(&x, 2.0)).unwrap();
    assert_eq!(values(&x), [1.0; 10]);
    graph.launch().unwrap();
    assert_eq!(values(&x), [2.0; 10]);
}

#[test]
fn lists_found_by_their_values_stay_as_long_as_the_graph_that_reads_them() {
    let device = gpu();
    let table =
        tensor(&(0..64).map(|v| v as f32).collect::<Vec<_>>(), &device).reshape((32, 2)).unwrap();
    let picked = tensor(&[0.0; 6], &device).reshape((3, 2)).unwrap();
    let body = || copy(&picked, &embedding(&constant(vec![7, 30, 2], 3, &device)?, &table, 0)?);
    body().unwrap();
    let graph = record(&device, body).unwrap();
    // More lists than are kept for lookup by value.
    for list in 0..200 {
        constant(vec![list, 1, 1], 3, &device).unwrap();
    }
    graph.launch().unwrap();
    assert_eq!(values(&picked), [14.0, 15.0, 60.0, 61.0, 4.0, 5.0]);
}

#[test]
fn values_of_the_host_are_refused_and_the_device_goes_on() {
    let device = gpu();
    let x = tensor(&[1.0; 10], &device);
    let error = record(&device, || upload(vec![1f32; 10], 10, &device).map(drop))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("values of the host cannot be part of a graph"), "{error}");
    let error = record(&device, || to_host(&x).map(drop)).err().unwrap().to_string();
    assert!(error.contains("values of the host cannot be part of a graph"), "{error}");
    scale_inplace(&x, 3.0).unwrap();
    assert_eq!(values(&x), [3.0; 10]);
}

#[test]
fn copies_of_the_host_are_found_past_the_crates_own_functions() {
    let device = gpu();
    let error =
        record(&device, || Tensor::new(&[1f32, 2.0], &device).map(drop).map_err(Error::from));
    let error = error.err().unwrap().to_string();
    // The driver itself may refuse to record them.
    assert!(
        error.contains("a copy of the host's memory was recorded") || error.contains("CAPTURE"),
        "{error}"
    );
}

#[test]
fn an_error_while_recording_is_the_one_that_is_told() {
    let device = gpu();
    let x = tensor(&[1.0; 10], &device);
    let error = record(&device, || {
        scale_inplace(&x, 2.0)?;
        gelu(&x.to_dtype(DType::U32)?).map(drop)
    });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("does not support dtype"), "{error}");
    scale_inplace(&x, 3.0).unwrap();
    assert_eq!(values(&x), [3.0; 10]);
}
