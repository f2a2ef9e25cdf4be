//! The name of a model: `user/repository`, and after a colon a tag, which says the quantisation or names a file.

/// What hosts are called in names that people copy.
const HOSTS: [&str; 5] = ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/", "hf://"];
/// As long as the hub allows a user's name and a repository's to be.
const LONGEST: usize = 96;

/// A repository, and which of its models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// `user/repository`.
    pub repository: String,
    /// A quantisation such as `Q8_0`, or a file's name.
    pub tag: Option<String>,
}

impl ModelName {
    /// Reads what stands where a file may stand too; `None` where it can only be a path.
    pub fn parse(text: &str) -> Option<ModelName> {
        let name = HOSTS.iter().find_map(|host| text.strip_prefix(host)).unwrap_or(text);
        let (repository, tag) = match name.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (name, None),
        };
        let (user, model) = repository.split_once('/')?;
        let is_file = [".gguf", ".bin"].iter().any(|ending| model.ends_with(ending));
        let is_tag = tag.is_none_or(|tag| !tag.is_empty() && tag.split('/').all(is_part));
        (is_part(user) && is_part(model) && !is_file && is_tag)
            .then(|| ModelName { repository: repository.into(), tag: tag.map(str::to_owned) })
    }
}

impl std::fmt::Display for ModelName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.repository)?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))
    }
}

/// Letters, digits, `-`, `_` and `.`, but no name of a folder above.
fn is_part(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && text.len() <= LONGEST && !text.starts_with('.') && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let name = |text: &str| ModelName::parse(text).map(|name| (name.repository, name.tag.unwrap_or_default()));
        let found = |repository: &str, tag: &str| Some((repository.to_owned(), tag.to_owned()));
        assert_eq!(name("ggml-org/gemma-4-E4B-it-GGUF"), found("ggml-org/gemma-4-E4B-it-GGUF", ""));
        assert_eq!(name("unsloth/g.4-GGUF:UD-Q4_K_XL"), found("unsloth/g.4-GGUF", "UD-Q4_K_XL"));
        assert_eq!(name("hf.co/a/b:q8_0"), found("a/b", "q8_0"));
        assert_eq!(name("https://huggingface.co/a/b"), found("a/b", ""));
        assert_eq!(name("a/b:BF16/model.gguf"), found("a/b", "BF16/model.gguf"));
        for path in
            ["model", "/a/b", "./a/b", "../b", "a/b/c", "a/b.gguf", "plans/e4b.bin", "a/", "/a", "a/..", "a b/c"]
        {
            assert_eq!(name(path), None, "{path}");
        }
        for wrong in ["a/b:", "a/b:../c", "a/b:x//y", &format!("a/{}", "b".repeat(97))] {
            assert_eq!(name(wrong), None, "{wrong}");
        }
    }
}
