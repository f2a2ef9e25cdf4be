//! A hub over a folder of `USER/REPOSITORY/FILE`, to try things by hand: `standin FOLDER [--tls CERTIFICATE.pem]`. It
//! prints what `HF_ENDPOINT` must be, writes the certificate for `SSL_CERT_FILE`, and runs until it is killed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::{env, fs, io, thread};

use gemma4c_hub_standin::{Repositories, Standin};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (folder, certificate) = match arguments.as_slice() {
        [folder] => (folder, None),
        [folder, flag, path] if flag == "--tls" => (folder, Some(path)),
        _ => return Err(io::Error::other("usage: standin FOLDER [--tls CERTIFICATE.pem]")),
    };
    let mut repositories = Repositories::new();
    for user in entries(Path::new(folder))? {
        for repository in entries(&Path::new(folder).join(&user))? {
            let name = format!("{user}/{repository}");
            let mut files = BTreeMap::new();
            for file in entries(&Path::new(folder).join(&name))? {
                files.insert(file.clone(), Arc::new(fs::read(Path::new(folder).join(&name).join(&file))?));
            }
            repositories.insert(name, files);
        }
    }
    let standin = Standin::start(repositories, certificate.is_some())?;
    if let (Some(path), Some(pem)) = (certificate, &standin.certificate) {
        fs::write(path, pem)?;
    }
    println!("{}", standin.endpoint);
    loop {
        thread::park();
    }
}

fn entries(folder: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}
