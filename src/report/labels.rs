//! Names for kernels: short, readable, and one for each.
//!
//! A plan has many instances of a kernel, told apart by everything that was chosen for them. A label says the kernel's
//! name and as few of the choices as tell it from its siblings in this plan: `matvec-K2560-NORMS2`. It is good as a
//! file's name.

use gemma4c_plan::cuda::Kernel;

/// A label for each kernel, in their order.
pub fn labels(kernels: &[Kernel]) -> Vec<String> {
    let choices: Vec<Vec<(&str, &str)>> = kernels.iter().map(|kernel| choices(&kernel.instance)).collect();
    let mut labels: Vec<String> = Vec::new();
    for (at, kernel) in kernels.iter().enumerate() {
        let mut siblings: Vec<usize> =
            (0..kernels.len()).filter(|other| *other != at && kernels[*other].name == kernel.name).collect();
        let mut label = kernel.name.clone();
        for (name, value) in &choices[at] {
            let differs = |other: &usize| choices[*other].iter().all(|choice| choice != &(*name, *value));
            if siblings.iter().any(differs) {
                siblings.retain(|other| !differs(other));
                label += &part(name, value);
            }
        }
        labels.push(label);
    }
    make_unique(&mut labels);
    labels
}

/// `matvec[K = 2560, side = side_q8_0]` as its choices.
pub fn choices(instance: &str) -> Vec<(&str, &str)> {
    let inner = instance.split_once('[').and_then(|(_, rest)| rest.strip_suffix(']')).unwrap_or("");
    inner.split(", ").filter_map(|choice| choice.split_once(" = ")).collect()
}

/// What a choice adds to a label. Yes-or-no choices and numbers need their names, words speak for themselves.
fn part(name: &str, value: &str) -> String {
    let text = match value {
        "true" => name.to_owned(),
        "false" => format!("no_{name}"),
        number if number.starts_with(|c: char| c.is_ascii_digit() || c == '-') => format!("{name}{number}"),
        word => word.to_owned(),
    };
    let plain: String = text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).collect();
    format!("-{plain}")
}

/// Two labels can only be equal in a plan that no compiler of ours wrote; they are numbered.
fn make_unique(labels: &mut [String]) {
    for at in 0..labels.len() {
        let (before, rest) = labels.split_at_mut(at);
        let base = rest[0].clone();
        let mut number = 2;
        while before.contains(&rest[0]) {
            rest[0] = format!("{base}-{number}");
            number += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(instances: &[&str], expected: &[&str]) {
        let kernel = |instance: &&str| Kernel {
            name: instance.split('[').next().unwrap_or_default().into(),
            instance: (*instance).into(),
            block: 32,
            shared: 0,
            written: 0,
            waits: false,
            waits_first: false,
            early: 0,
        };
        assert_eq!(labels(&instances.iter().map(kernel).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn a_label_says_what_tells_a_kernel_from_its_siblings() {
        check(&["take_row", "gather[value = value_q8_0]"], &["take_row", "gather"]);
        check(
            &[
                "matvec[K = 256, ROWS = 1, GEGLU = true, side = side_q8_0]",
                "matvec[K = 512, ROWS = 1, GEGLU = true, side = side_q8_0]",
                "matvec[K = 512, ROWS = 1, GEGLU = false, side = then a then b]",
            ],
            &["matvec-K256", "matvec-K512-GEGLU", "matvec-K512-no_GEGLU"],
        );
        check(&["a[x = f32]", "a[x = f16]"], &["a-f32", "a-f16"]);
        check(&["a[x = 1]", "a[x = 1]", "a[x = 1]"], &["a", "a-2", "a-3"]);
    }
}
