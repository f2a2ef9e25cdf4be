//! What a repository has: the hub's list of its files, checked, since names become paths.

use serde_json::Value;

use crate::error::HubError;
use crate::name::ModelName;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// With its folders.
    pub name: String,
    pub bytes: u64,
    /// What the cache calls its content: the SHA-256 of a large file, git's hash of a small one.
    pub etag: String,
}

/// A repository as it is at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    /// What it is called now.
    pub name: String,
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

impl Repository {
    /// Reads the answer to `/api/models/NAME/revision/main?blobs=true`.
    pub(crate) fn read(asked: &str, address: &str, answer: &[u8]) -> Result<Repository, HubError> {
        let wrong = |why: String| HubError::Answer { address: address.into(), why };
        let answer: Value =
            serde_json::from_slice(answer).map_err(|error| wrong(format!("the list of files is no JSON: {error}")))?;
        let commit = answer["sha"].as_str().filter(|sha| is_hash(sha));
        let commit = commit.ok_or_else(|| wrong("the list of files names no commit".into()))?.to_owned();
        // A repository that was renamed answers under its new name.
        let name = answer["id"].as_str().filter(|id| ModelName::parse(id).is_some_and(|name| name.tag.is_none()));
        let siblings = answer["siblings"].as_array().ok_or_else(|| wrong("the list of files is missing".into()))?;
        let mut files = Vec::new();
        for file in siblings {
            let name = file["rfilename"].as_str().unwrap_or_default();
            if !is_path_below(name) {
                return Err(wrong(format!("the list of files has the impossible name {name:?}")));
            }
            let large = &file["lfs"];
            let etag = large["sha256"].as_str().or(file["blobId"].as_str()).filter(|etag| is_hash(etag));
            let bytes = large["size"].as_u64().or(file["size"].as_u64());
            // Without both there is nothing to compare it with.
            if let (Some(etag), Some(bytes)) = (etag, bytes) {
                files.push(RemoteFile { name: name.into(), bytes, etag: etag.into() });
            }
        }
        Ok(Repository { name: name.unwrap_or(asked).to_owned(), commit, files })
    }
}

/// A SHA-1 or a SHA-256 in hexadecimal digits.
pub fn is_hash(text: &str) -> bool {
    [40, 64].contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether a name, joined to a folder, is a file in it.
fn is_path_below(name: &str) -> bool {
    let is_part = |part: &str| !["", ".", ".."].contains(&part) && !part.contains(['\\', '\0']);
    name.len() <= 512 && name.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(answer: &str) -> Result<Repository, String> {
        Repository::read("a/b", "http://hub", answer.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_list_is_read_and_names_cannot_leave_the_folder() {
        let (commit, sha) = ("c".repeat(40), "5".repeat(64));
        let list = |name: &str| {
            format!(
                r#"{{"id":"a/new","sha":"{commit}","siblings":[{{"rfilename":"no-size.txt"}},
                {{"rfilename":"{name}","size":5,"blobId":"{commit}","lfs":{{"sha256":"{sha}","size":7}}}}]}}"#
            )
        };
        let read_one = read(&list("d/m.gguf")).expect("a list");
        assert_eq!((read_one.name.as_str(), read_one.commit.as_str()), ("a/new", commit.as_str()));
        assert_eq!(read_one.files, [RemoteFile { name: "d/m.gguf".into(), bytes: 7, etag: sha.clone() }]);
        for name in ["/etc/m.gguf", "../m.gguf", "a/../../m.gguf", "a//m", "", "a/.", "a\\\\..\\\\b"] {
            let error = read(&list(name)).expect_err(name);
            assert!(error.contains("impossible name"), "{error}");
        }
        for damaged in ["", "{}", "[]", r#"{"sha":"../.."}"#, &list("m").replace(&commit, "x"), "{\"sha\":"] {
            read(damaged).expect_err(damaged);
        }
    }
}
