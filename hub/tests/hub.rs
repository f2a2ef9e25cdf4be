//! Models by name against a hub on this machine, which fails as hubs fail.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gemma4c_hub::pick::{self, Selection, Wanted};
use gemma4c_hub::{Hub, HubError, Progress, RemoteFile, Repository, Settings};
use gemma4c_hub_standin::{COMMIT, Faults, Repositories, Standin, sha256};

const NAME: &str = "someone/gemma-GGUF";
const MODEL: &str = "gemma-Q8_0.gguf";
const MODEL_BYTES: usize = 3_000_001;

/// Bytes that no two places have in common for long.
fn bytes(count: usize, seed: u64) -> Arc<Vec<u8>> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    Arc::new((0..count).map(|_| next()).collect())
}

fn repositories() -> Repositories {
    let files = [
        (MODEL, bytes(MODEL_BYTES, 1)),
        ("gemma-Q4_0.gguf", bytes(1_500_000, 2)),
        ("mmproj-BF16.gguf", bytes(40_000, 3)),
        ("MTP/mtp-gemma-Q8_0.gguf", bytes(30_000, 4)),
        ("README.md", bytes(100, 5)),
    ];
    let files: BTreeMap<_, _> = files.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
    BTreeMap::from([(NAME.to_owned(), files)])
}

/// A hub, a cache, and a client of both.
struct Setting {
    standin: Standin,
    folder: tempfile::TempDir,
}

impl Setting {
    fn new(with_tls: bool) -> Setting {
        let standin = Standin::start(repositories(), with_tls).expect("two free ports");
        Setting { standin, folder: tempfile::tempdir().expect("a folder") }
    }

    fn settings(&self) -> Settings {
        Settings {
            endpoint: self.standin.endpoint.clone(),
            cache: self.folder.path().join("hub"),
            token: Some("hf_secret".into()),
            is_offline: false,
            roots: self.standin.certificate.clone().map(String::into_bytes),
            connections: 4,
            piece: 40_000,
            patience: Duration::from_millis(1),
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings()).expect("a hub")
    }

    fn look_up(&self) -> Repository {
        self.hub().look_up(NAME).expect("the repository").repository
    }

    fn fetch(&self) -> Result<Vec<PathBuf>, HubError> {
        let repository = self.look_up();
        self.hub().fetch(&repository, &selection(&repository).files(), &mut |_| {})
    }

    fn blob(&self, name: &str) -> PathBuf {
        let hash = sha256(&repositories()[NAME][name]);
        self.folder.path().join("hub/models--someone--gemma-GGUF/blobs").join(hash)
    }
}

fn selection(repository: &Repository) -> Selection<'_> {
    let wanted = Wanted { tag: None, room: (1 << 30, "here"), is_readable: &|_| true, projector: true, drafter: true };
    pick::select(repository, &wanted).expect("a model")
}

fn with(change: impl FnOnce(&mut Faults)) -> Faults {
    let mut faults = Faults::default();
    change(&mut faults);
    faults
}

fn says(error: &HubError, text: &str) {
    let error = error.to_string();
    assert!(error.contains(text), "{error:?} does not say {text:?}");
}

#[test]
fn a_model_and_what_goes_with_it_come_into_the_cache_once() {
    let setting = Setting::new(true);
    let mut seen = Vec::new();
    let repository = setting.look_up();
    let selection = selection(&repository);
    let paths = setting.hub().fetch(&repository, &selection.files(), &mut |progress| match progress {
        Progress::Whole { file } => seen.push(file.name.clone()),
        Progress::Arrived { file, bytes } => assert!(bytes <= file.bytes),
        Progress::Waits { .. } => panic!("nobody else is there"),
    });
    let paths = paths.expect("three files");
    assert_eq!(seen, [MODEL, "mmproj-BF16.gguf", "MTP/mtp-gemma-Q8_0.gguf"]);
    for (path, name) in paths.iter().zip(&seen) {
        assert_eq!(fs::read(path).expect("a file"), *repositories()[NAME][name]);
    }
    // As other programs of Hugging Face's cache have it.
    let folder = setting.folder.path().join("hub/models--someone--gemma-GGUF");
    assert_eq!(fs::read_to_string(folder.join("refs/main")).expect("a ref"), COMMIT);
    assert_eq!(paths[2], folder.join("snapshots").join(COMMIT).join("MTP/mtp-gemma-Q8_0.gguf"));
    let target = fs::read_link(&paths[2]).expect("a link");
    assert_eq!(target, Path::new("../../../blobs").join(sha256(&repositories()[NAME]["MTP/mtp-gemma-Q8_0.gguf"])));

    let asked = setting.standin.asked();
    let of_model = asked.iter().filter(|asked| asked.is_storage && asked.path.contains(&format!("/{MODEL}"))).count();
    assert_eq!(of_model, MODEL_BYTES.div_ceil(40_000), "a request for each piece");
    for asked in &asked {
        assert_eq!(asked.token.is_some(), !asked.is_storage, "the token is for the hub alone: {asked:?}");
    }
    assert!(
        asked.iter().filter(|asked| !asked.is_storage).all(|asked| asked.token.as_deref() == Some("Bearer hf_secret"))
    );

    setting.standin.sent();
    setting.fetch().expect("all is here");
    assert_eq!((setting.standin.sent(), setting.standin.asked().len()), (0, 1), "the list, and nothing else");
}

#[test]
fn what_was_cut_is_resumed() {
    let setting = Setting::new(false);
    setting.standin.set(with(|faults| faults.cut_after = Some(900_000)));
    says(&setting.fetch().expect_err("it was cut"), "cannot reach");
    let here = setting.blob(MODEL).with_extension("incomplete").metadata().expect("a part").len();
    assert!((100_000..=900_000).contains(&here), "{here}");
    assert!(!setting.blob(MODEL).exists());

    setting.standin.sent();
    setting.standin.set(Faults::default());
    let paths = setting.fetch().expect("the rest");
    assert_eq!(setting.standin.sent(), MODEL_BYTES as u64 - here + 70_000, "only what was missing");
    assert_eq!(fs::read(&paths[0]).expect("a file"), *repositories()[NAME][MODEL]);
}

/// Whoever wrote it: a file's start is a file's start.
#[test]
fn what_another_program_began_is_resumed_and_what_is_too_long_is_not() {
    let setting = Setting::new(false);
    let whole = repositories()[NAME][MODEL].clone();
    let path = setting.blob(MODEL).with_extension("incomplete");
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(&path, &whole[..2_999_000]).expect("a part");
    setting.fetch().expect("the rest");
    assert_eq!(setting.standin.sent(), 1_001 + 70_000);

    let setting = Setting::new(false);
    let path = setting.blob(MODEL).with_extension("incomplete");
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(&path, [&whole[..], b"more"].concat()).expect("a part");
    setting.fetch().expect("all of it");
    assert_eq!(setting.standin.sent(), MODEL_BYTES as u64 + 70_000);
}

#[test]
fn a_wrong_byte_is_found_and_what_has_it_is_deleted() {
    let setting = Setting::new(false);
    setting.standin.set(with(|faults| faults.flipped = Some((MODEL.into(), 1_234_567))));
    let error = setting.fetch().expect_err("it is damaged");
    assert!(matches!(&error, HubError::Damaged { file, .. } if file == MODEL));
    says(&error, "arrived damaged: its SHA-256 is");
    assert!(!setting.blob(MODEL).exists() && !setting.blob(MODEL).with_extension("incomplete").exists());
    setting.standin.set(Faults::default());
    setting.fetch().expect("all of it");
}

#[test]
fn refusals_say_what_to_do() {
    let setting = Setting::new(false);
    let error = setting.hub().look_up("someone/else").err().expect("it is not there");
    says(&error, "has no repository someone/else, or none that may be read: check the name, and what the token");
    let without = Hub::new(Settings { token: None, ..setting.settings() }).expect("a hub");
    says(&without.look_up("someone/else").err().expect("not there"), "a private one needs a token in HF_TOKEN");
    setting.standin.set(with(|faults| faults.gated = vec![NAME.into()]));
    says(&setting.hub().look_up(NAME).err().expect("it is gated"), "is gated: accept its terms at http://localhost:");
    setting.standin.set(with(|faults| faults.statuses = vec![(401, None)]));
    says(&setting.hub().look_up(NAME).err().expect("a wrong token"), "refuses the token in HF_TOKEN");
    setting.standin.set(with(|faults| faults.statuses = vec![(429, Some(3600))]));
    says(&setting.hub().look_up(NAME).err().expect("too many"), "try again in 3600 seconds");
    setting.standin.set(with(|faults| faults.without_ranges = true));
    says(&setting.fetch().expect_err("no ranges"), "does not send parts of files");
    // A file whose size nobody has room for.
    setting.standin.set(Faults::default());
    let repository = setting.look_up();
    let huge = RemoteFile { name: "huge.gguf".into(), bytes: 1 << 60, etag: "a".repeat(64) };
    let error = setting.hub().fetch(&repository, &[&huge], &mut |_| {}).expect_err("no room");
    says(&error, "bytes free, and huge.gguf needs 1152921504606846976 more: make room, or set HF_HOME");
}

#[test]
fn what_passes_is_waited_for() {
    let setting = Setting::new(false);
    setting.standin.set(with(|faults| {
        faults.statuses = vec![(503, None), (429, Some(0))];
        faults.expired = 3;
    }));
    setting.fetch().expect("all of it, in the end");
}

#[test]
fn a_renamed_repository_is_found_under_its_new_name() {
    let setting = Setting::new(false);
    let renamed = BTreeMap::from([("old/name".to_owned(), NAME.to_owned())]);
    setting.standin.set(with(|faults| faults.renamed = renamed));
    let found = setting.hub().look_up("old/name").expect("the repository");
    assert_eq!(found.repository.name, NAME);
}

#[test]
fn two_at_once_fetch_once() {
    let setting = Setting::new(false);
    thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| setting.fetch().map(|paths| paths.len())));
        for one in both {
            assert_eq!(one.join().expect("no panic").expect("all files"), 3);
        }
    });
    assert_eq!(setting.standin.sent(), MODEL_BYTES as u64 + 70_000);
}

#[test]
fn without_a_network_the_cache_is_what_there_is() {
    let setting = Setting::new(false);
    let offline = Hub::new(Settings { is_offline: true, ..setting.settings() }).expect("a hub");
    says(
        &offline.look_up(NAME).err().expect("nothing is here"),
        "HF_HUB_OFFLINE is set, and someone/gemma-GGUF is not in",
    );
    let paths = setting.fetch().expect("all files");
    let found = offline.look_up(NAME).expect("it is here");
    assert!(found.instead.is_none());
    let again = offline.fetch(&found.repository, &selection(&found.repository).files(), &mut |_| {});
    assert_eq!(again.expect("all files"), paths);
    let missing = RemoteFile { name: "other.gguf".into(), bytes: 1, etag: "a".repeat(64) };
    says(&offline.fetch(&found.repository, &[&missing], &mut |_| {}).expect_err("not here"), "is not here as a whole");

    // Nobody listens there.
    let nowhere = Hub::new(Settings { endpoint: "http://localhost:9".into(), ..setting.settings() }).expect("a hub");
    let found = nowhere.look_up(NAME).expect("it is here");
    says(&found.instead.expect("a reason"), "cannot reach http://localhost:9");
    says(&nowhere.look_up("someone/else").err().expect("not here"), "is there a network?");
}

#[test]
fn a_hub_that_cannot_prove_who_it_is_is_not_asked() {
    let setting = Setting::new(true);
    let unknown = Hub::new(Settings { roots: None, ..setting.settings() }).expect("a hub");
    says(&unknown.look_up(NAME).err().expect("nobody signed it"), "cannot prove who it is");
    let error = Hub::new(Settings { roots: Some(b"nothing".to_vec()), ..setting.settings() }).err();
    says(&error.expect("no certificate"), "has no certificate in PEM");
}
