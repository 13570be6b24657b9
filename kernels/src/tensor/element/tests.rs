use half::{bf16, f16};

use super::Elem;

/// f32 patterns in small odd steps, and the patterns where rounding decides between neighbours.
fn patterns() -> impl Iterator<Item = f32> {
    let halfway =
        (0..1 << 16).flat_map(|high: u32| [0x7fff, 0x8000, 0x8001].map(|low| high << 16 | low));
    let halfway_f16 =
        (0..1 << 19).flat_map(|high: u32| [0xfff, 0x1000, 0x1001].map(|low| high << 13 | low));
    (0..=u32::MAX).step_by(1021).chain(halfway).chain(halfway_f16).map(f32::from_bits)
}

#[test]
fn stores_are_the_reference_conversions() {
    for v in patterns() {
        let (b, h) = (<bf16 as Elem>::store(v), <f16 as Elem>::store(v));
        assert_eq!(b.to_bits(), bf16::from_f32(v).to_bits(), "{v}");
        let want = f16::from_f32_const(v);
        assert!(
            h.to_bits() == want.to_bits() || h.is_nan() && want.is_nan(),
            "{v}: {h}, want {want}"
        );
        assert_eq!(h.is_sign_negative(), v.is_sign_negative());
    }
}

#[test]
fn loads_are_exact_and_survive_storing() {
    for bits in 0..=u16::MAX {
        let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
        assert!(b.load() == b.to_f32() || b.is_nan() && b.load().is_nan());
        assert!(
            h.load() == h.to_f32_const() || h.is_nan() && h.load().is_nan(),
            "{bits:x}: {}",
            h.load()
        );
        assert!(<bf16 as Elem>::store(b.load()).to_bits() == bits || b.is_nan());
        assert!(<f16 as Elem>::store(h.load()).to_bits() == bits || h.is_nan());
    }
}
