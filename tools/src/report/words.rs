//! Numbers with units, as readable text.

/// `1 step`, `2 steps`, `2 microbatches`.
pub fn count(n: u64, what: &str) -> String {
    let plural = match (n, what.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{n} {what}{plural}")
}

/// A duration in a suitable unit.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 99.995 => format!("{s:.2} s"),
        _ if whole < 3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!([0, 1, 2].map(|n| count(n, "step")), ["0 steps", "1 step", "2 steps"]);
        assert_eq!([1, 4].map(|n| count(n, "microbatch")), ["1 microbatch", "4 microbatches"]);
    }

    #[test]
    fn no_time_is_rounded_to_nothing() {
        let times = [3e-5, 0.0042, 0.85, 1.0, 99.99, 200.0, 7500.0].map(duration);
        assert_eq!(
            times,
            ["30 µs", "4.2 ms", "850.0 ms", "1.00 s", "99.99 s", "3 min 20 s", "2 h 5 min"]
        );
    }
}
