//! The folders below which a client may name adapters. It can send any path, and must not be able to have any other
//! file read: what counts is where the files are once every link was followed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gemma4c_models::adapter;

/// Folders that were opened for loading, with all links followed.
#[derive(Clone, Debug)]
pub struct Folders(Vec<PathBuf>);

impl Folders {
    /// The error comes with the folder that it is about.
    pub fn open(folders: &[PathBuf]) -> Result<Folders, (PathBuf, io::Error)> {
        let open = |folder: &PathBuf| match fs::canonicalize(folder) {
            Ok(real) if real.is_dir() => Ok(real),
            Ok(_) => Err((folder.clone(), io::ErrorKind::NotADirectory.into())),
            Err(error) => Err((folder.clone(), error)),
        };
        Ok(Folders(folders.iter().map(open).collect::<Result<_, _>>()?))
    }

    /// Where an adapter is that a client names, from the root or from one of the folders. Nothing is said of what is
    /// elsewhere: `None` also means that there is nothing.
    pub fn find(&self, named: &str) -> Option<PathBuf> {
        self.0.iter().map(|folder| folder.join(named)).find_map(|path| self.below(&path))
    }

    /// The path, if it and all files of the adapter are below the folders.
    fn below(&self, path: &Path) -> Option<PathBuf> {
        let path = self.real(path)?;
        let is_readable = |file: &PathBuf| self.real(file).is_some_and(|file| file.is_file());
        adapter::files(&path).iter().all(is_readable).then_some(path)
    }

    fn real(&self, path: &Path) -> Option<PathBuf> {
        let real = fs::canonicalize(path).ok()?;
        self.0.iter().any(|folder| real.starts_with(folder)).then_some(real)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_outside_is_found_whatever_it_is_called() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        for folder in ["open/peft", "open/half", "open/linked", "other", "opened-not"] {
            fs::create_dir_all(path(folder)).unwrap();
        }
        let files = ["adapter_config.json", "adapter_model.safetensors"];
        for name in ["open/a.gguf", "other/b.gguf", "opened-not/c.gguf"] {
            fs::write(path(name), "x").unwrap();
        }
        for folder in ["open/peft", "other"] {
            files.iter().for_each(|file| fs::write(path(folder).join(file), "x").unwrap());
        }
        fs::write(path("open/half").join(files[0]), "x").unwrap();
        fs::write(path("open/linked").join(files[0]), "x").unwrap();
        symlink(path("other").join(files[1]), path("open/linked").join(files[1])).unwrap();
        symlink(path("other/b.gguf"), path("open/b.gguf")).unwrap();
        symlink(path("other"), path("open/out")).unwrap();
        symlink(path("open/a.gguf"), path("open/again.gguf")).unwrap();
        symlink(path("open"), path("door")).unwrap();

        // A folder that is a link is where it leads.
        let folders = Folders::open(&[path("door")]).unwrap();
        let real = |name: &str| Some(fs::canonicalize(path(name)).unwrap());
        let absolute = |name: &str| path(name).to_str().unwrap().to_owned();
        for (named, found) in [
            ("a.gguf", "open/a.gguf"),
            ("./peft/../a.gguf", "open/a.gguf"),
            ("again.gguf", "open/a.gguf"),
            ("peft", "open/peft"),
            ("peft/adapter_config.json", "open/peft/adapter_config.json"),
            (&absolute("open/a.gguf"), "open/a.gguf"),
            (&absolute("door/a.gguf"), "open/a.gguf"),
            (&absolute("other/../open/peft"), "open/peft"),
        ] {
            assert_eq!(folders.find(named), real(found), "{named}");
        }
        for named in [
            "b.gguf",
            "out",
            "out/b.gguf",
            "linked",
            "half",
            "missing.gguf",
            "../other/b.gguf",
            "../opened-not/c.gguf",
            "",
            ".",
            "\0",
            "/etc/passwd",
            "/dev/zero",
            &absolute("other/b.gguf"),
            &absolute("opened-not/c.gguf"),
        ] {
            assert_eq!(folders.find(named), None, "{named}");
        }
        assert!(Folders::open(&[path("nowhere")]).is_err() && Folders::open(&[path("open/a.gguf")]).is_err());
    }
}
