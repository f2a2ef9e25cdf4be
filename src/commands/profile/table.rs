//! Launches summed up by kernel, the most expensive first.

use std::fmt::Write;

/// One launch, and what it took.
#[derive(Clone)]
pub struct Launched {
    pub kernel: String,
    /// The kernel with everything that was chosen for it.
    pub instance: String,
    /// The value it makes, without its layer.
    pub makes: String,
    pub layer: Option<u32>,
    pub bytes: u64,
    pub flops: u64,
    pub microseconds: f64,
}

/// The most the GPU can do.
pub struct Ceilings {
    /// GB/s.
    pub gigabytes: f64,
    /// TFLOP/s.
    pub teraflops: f64,
}

impl Ceilings {
    /// Microseconds that so much takes at least.
    pub fn floor(&self, bytes: f64, flops: f64) -> f64 {
        (bytes / self.gigabytes / 1e3).max(flops / self.teraflops / 1e6)
    }
}

/// A value's name without the layer it belongs to, so that equal steps of all layers have one.
pub fn without_layer(name: &str) -> &str {
    let after = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    match after {
        Some((layer, rest)) if layer.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => name,
    }
}

/// What several launches of one kernel took together.
struct Sum {
    kernel: String,
    instance: String,
    makes: String,
    count: usize,
    microseconds: f64,
    bytes: f64,
    flops: f64,
}

fn sums(launched: &[Launched]) -> Vec<Sum> {
    let mut sums: Vec<Sum> = Vec::new();
    for launch in launched {
        let same = |sum: &&mut Sum| sum.instance == launch.instance && sum.makes == launch.makes;
        let sum = match sums.iter_mut().find(same) {
            Some(sum) => sum,
            None => {
                let (instance, makes) = (launch.instance.clone(), launch.makes.clone());
                let kernel = launch.kernel.clone();
                sums.push(Sum { kernel, instance, makes, count: 0, microseconds: 0.0, bytes: 0.0, flops: 0.0 });
                let last = sums.len() - 1;
                &mut sums[last]
            }
        };
        sum.count += 1;
        sum.microseconds += launch.microseconds;
        sum.bytes += launch.bytes as f64;
        sum.flops += launch.flops as f64;
    }
    sums.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
    sums
}

/// A table in Markdown, with what is lost against the floors in its last column.
pub fn table(launched: &[Launched], ceilings: &Ceilings) -> String {
    let mut text = String::from(
        "| kernel | makes | launches | us | each | share | GB/s | TFLOP/s | of its floor | lost us |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let total: f64 = launched.iter().map(|launch| launch.microseconds).sum();
    let mut row = |name: &str, makes: &str, count: usize, us: f64, bytes: f64, flops: f64| {
        let floor = ceilings.floor(bytes, flops);
        let time = us.max(1e-9);
        let _ = writeln!(
            text,
            "| {name} | {makes} | {count} | {us:.1} | {:.2} | {:.1} % | {:.0} | {:.1} | {:.0} % | {:.1} |",
            us / count.max(1) as f64,
            100.0 * us / total.max(1e-9),
            bytes / time / 1e3,
            flops / time / 1e6,
            100.0 * floor / time,
            us - floor,
        );
    };
    for sum in sums(launched) {
        row(&sum.kernel, &sum.makes, sum.count, sum.microseconds, sum.bytes, sum.flops);
    }
    let bytes = launched.iter().map(|launch| launch.bytes as f64).sum();
    let flops = launched.iter().map(|launch| launch.flops as f64).sum();
    row("all", "", launched.len(), total, bytes, flops);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_steps_of_all_layers_are_one_row_and_the_dearest_comes_first() {
        let launch = |kernel: &str, value: &str, microseconds| Launched {
            kernel: kernel.into(),
            instance: format!("{kernel} K=1"),
            makes: without_layer(value).into(),
            layer: None,
            bytes: 4_400_000,
            flops: 0,
            microseconds,
        };
        let launched = [
            launch("norm", "blk.0.attention.normed", 1.0),
            launch("matvec", "blk.0.mlp.out", 2.0),
            launch("norm", "blk.1.attention.normed", 2.0),
            launch("matvec", "blk.11.mlp.out", 2.0),
            launch("matvec", "head.logits", 1.0),
        ];
        let text = table(&launched, &Ceilings { gigabytes: 4400.0, teraflops: 790.0 });
        let rows: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(rows[0], "| matvec | mlp.out | 2 | 4.0 | 2.00 | 50.0 % | 2200 | 0.0 | 50 % | 2.0 |");
        assert_eq!(rows[1], "| norm | attention.normed | 2 | 3.0 | 1.50 | 37.5 % | 2933 | 0.0 | 67 % | 1.0 |");
        assert_eq!(rows[2], "| matvec | head.logits | 1 | 1.0 | 1.00 | 12.5 % | 4400 | 0.0 | 100 % | 0.0 |");
        assert_eq!(rows[3], "| all |  | 5 | 8.0 | 1.60 | 100.0 % | 2750 | 0.0 | 62 % | 3.0 |");
    }

    #[test]
    fn a_name_loses_its_layer_and_nothing_else() {
        assert_eq!(without_layer("blk.12.attention.q"), "attention.q");
        assert_eq!(without_layer("blk.x.y"), "blk.x.y");
        assert_eq!(without_layer("head.logits"), "head.logits");
    }
}
