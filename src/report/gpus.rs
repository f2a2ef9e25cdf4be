//! The GPUs whose limits a plan's work is held against.
//!
//! A floor is what a launch takes at least: all its bytes at full bandwidth, or all its arithmetic on full tensor cores,
//! whichever is longer. No launch reaches it; how near one comes is what a profile tells.

/// A GPU's two limits.
#[derive(Debug)]
pub struct Gpu {
    /// As `--gpu` takes it.
    pub key: &'static str,
    pub name: &'static str,
    /// The architecture that stands for it where nobody chose.
    pub arch: &'static str,
    /// Bytes a second from its memory.
    pub bandwidth: f64,
    /// bf16 operations a second, dense, accumulated in f32.
    pub compute: f64,
    /// Where the two numbers are from.
    pub source: &'static str,
}

/// The first one of an architecture is its default.
pub static GPUS: [Gpu; 6] = [
    Gpu { key: "h200", name: "H200", arch: "sm_90a", bandwidth: 4.4e12, compute: 790e12, source: "measured" },
    Gpu { key: "h100", name: "H100 SXM", arch: "sm_90a", bandwidth: 3.35e12, compute: 989e12, source: "data sheet" },
    Gpu { key: "a100", name: "A100 80GB", arch: "sm_80", bandwidth: 2.04e12, compute: 312e12, source: "data sheet" },
    Gpu { key: "rtx-4090", name: "RTX 4090", arch: "sm_89", bandwidth: 1.01e12, compute: 165e12, source: "data sheet" },
    Gpu { key: "l40s", name: "L40S", arch: "sm_89", bandwidth: 0.864e12, compute: 362e12, source: "data sheet" },
    Gpu {
        key: "rtx-5090",
        name: "RTX 5090",
        arch: "sm_120a",
        bandwidth: 1.79e12,
        compute: 210e12,
        source: "data sheet",
    },
];

impl Gpu {
    pub fn find(key: &str) -> Result<&'static Gpu, String> {
        let names = || GPUS.iter().map(|gpu| gpu.key).collect::<Vec<_>>().join(", ");
        GPUS.iter().find(|gpu| gpu.key == key).ok_or_else(|| format!("there are {}", names()))
    }

    /// The one that a plan for these architectures is most likely for.
    pub fn for_architectures(names: &[String]) -> &'static Gpu {
        let first = names.first().map_or("", String::as_str);
        GPUS.iter().find(|gpu| gpu.arch == first).unwrap_or(&GPUS[0])
    }

    /// Seconds that a launch takes at least.
    pub fn floor(&self, bytes: u64, flops: u64) -> f64 {
        (bytes as f64 / self.bandwidth).max(flops as f64 / self.compute)
    }
}

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
    fn a_floor_is_the_longer_of_reading_and_computing() {
        let gpu = Gpu::find("h200").expect("the table has it");
        assert_eq!(gpu.floor(4_400_000, 0), 1e-6);
        assert_eq!(gpu.floor(4_400_000, 1_580_000_000), 2e-6);
        assert!(Gpu::find("voodoo2").expect_err("not a GPU of ours").contains("h200"));
        assert_eq!(Gpu::for_architectures(&["sm_89".into()]).key, "rtx-4090");
    }

    #[test]
    fn quantities_have_three_figures() {
        assert_eq!(
            [time(2.0), time(1.5e-3), time(12.34e-6), time(123.4e-6), time(0.0)],
            ["2.00 s", "1.50 ms", "12.3 µs", "123 µs", "0.00 µs"]
        );
        assert_eq!([flops(12), flops(15_728_640), flops(999_600)], ["12 FLOP", "15.7 MFLOP", "1.0 MFLOP"]);
    }
}
