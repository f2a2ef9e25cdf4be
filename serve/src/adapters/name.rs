//! What an adapter may be called: by a path in an address, a label of a metric and a line of a log alike.

/// Characters of a name, at most.
const LONGEST: usize = 128;

/// Why a name will not do. A colon begins a tag, which names have in ollama's lists.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_taken = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    match name.chars().all(is_taken) && name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.len() <= LONGEST {
        true => Ok(()),
        false => Err(format!(
            "an adapter's name is at most {LONGEST} letters, digits and -_./ and begins with a letter or a digit"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_plain() {
        for name in ["sql", "org/style-v2.1", "0", &"x".repeat(128)] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        for name in ["", "a b", "a:latest", "é", "-x", "/x", "a\n", "a\"", "a=b", "a@b", &"x".repeat(129)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
