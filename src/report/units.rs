//! Times and operations as people say them.

/// A time as people say it: `12.3 µs`.
pub fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

/// Operations as people say them: `15.7 MFLOP`.
pub fn flops(n: u64) -> String {
    let units = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut unit) = (n as f64, 0);
    while value >= 999.5 && unit + 1 < units.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    if unit == 0 { format!("{n} FLOP") } else { format!("{value:.1} {}FLOP", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_three_figures() {
        assert_eq!(
            [time(2.0), time(1.5e-3), time(12.34e-6), time(123.4e-6), time(0.0)],
            ["2.00 s", "1.50 ms", "12.3 µs", "123 µs", "0.00 µs"]
        );
        assert_eq!([flops(12), flops(15_728_640), flops(999_600)], ["12 FLOP", "15.7 MFLOP", "1.0 MFLOP"]);
    }
}
