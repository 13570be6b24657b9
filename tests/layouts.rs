//! One loss curve on any layout: every cut of a run follows the single process, from bitwise the same initial weights.

use system_tests::{Run, Style, context, interleave, largest_relative_difference, layout, tiny, train};

/// dp · cp · tp · pp
const LAYOUTS: [(usize, usize, usize, usize); 17] = [
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 4, 1),
    (1, 1, 1, 2),
    (1, 1, 1, 4),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (1, 1, 2, 2),
    (2, 1, 2, 2),
    (1, 1, 2, 4),
    (1, 2, 1, 1),
    (1, 4, 1, 1),
    (1, 2, 2, 1),
    (2, 2, 1, 1),
    (1, 2, 1, 2),
    (2, 2, 2, 2),
];
const STEPS: usize = 30;
/// Allowed relative difference; measured ones are about 1e-8 in losses and 1e-7 in gradient norms.
const TOLERANCE: f64 = 1e-4;

fn agree(what: &str, run: &Run, alone: &Run) {
    assert!(run.initial == alone.initial, "{what}: initial weights differ");
    let loss = largest_relative_difference(&run.losses, &alone.losses);
    let norm = largest_relative_difference(&run.grad_norms, &alone.grad_norms);
    println!("{what}: losses within {loss:.1e}, gradient norms within {norm:.1e}");
    assert!(loss <= TOLERANCE, "{what}: losses differ by {loss:e}\n{:?}\n{:?}", run.losses, alone.losses);
    assert!(norm <= 1e-3, "{what}: gradient norms differ by {norm:e}\n{:?}\n{:?}", run.grad_norms, alone.grad_norms);
}

fn every_layout_follows_the_single_process(style: Style, dropout: f64) {
    let alone = train(&tiny(style, dropout), STEPS).unwrap();
    assert!(alone.losses[STEPS - 1] < alone.losses[0] - 0.2, "the model learns nothing: {:?}", alone.losses);
    for (dp, cp, tp, pp) in LAYOUTS {
        let plain = context(layout(tiny(style, dropout), dp, tp, pp), cp);
        let mut variants = vec![("", plain.clone())];
        if pp > 1 {
            variants.push((" interleaved", interleave(plain.clone(), 2)));
        }
        for (name, mut config) in variants {
            let what = format!("{style:?} dropout {dropout} {dp}·{cp}·{tp}·{pp}{name}");
            agree(&what, &train(&config, STEPS).unwrap(), &alone);
            if tp > 1 {
                config.parallel.sequence_parallel = true;
                agree(&format!("{what} sp"), &train(&config, STEPS).unwrap(), &alone);
            }
        }
    }
}

#[test]
fn gpt2_style() {
    every_layout_follows_the_single_process(Style::Gpt2, 0.0);
}

#[test]
fn gpt2_style_with_dropout() {
    every_layout_follows_the_single_process(Style::Gpt2, 0.1);
}

#[test]
fn llama_style() {
    every_layout_follows_the_single_process(Style::Llama, 0.0);
}

#[test]
fn llama_style_with_dropout() {
    every_layout_follows_the_single_process(Style::Llama, 0.1);
}
