//! A client for unit tests: speaks to a session in whole messages and carries out its effects.

use super::*;
use holdfast_base::{BlockData, BlockError, BlockOp};

impl Exports for Vec<ExportInfo> {
    fn list(&self) -> Vec<ExportInfo> {
        self.iter().filter(|export| self.refusal(&export.name).is_none()).cloned().collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.iter().find(|export| export.name == name && self.refusal(name).is_none()).cloned()
    }

    /// What is others' is not for this client.
    fn refusal(&self, name: &str) -> Option<String> {
        name.starts_with("others-").then(|| format!("{name} is not for you; ask for it"))
    }

    /// These come when they are asked for.
    fn is_elsewhere(&self, name: &str) -> bool {
        name.starts_with("far-") && self.find(name).is_none()
    }

    /// Every export has two.
    fn snapshots(&self, _export: &str) -> Vec<(String, ObjectId)> {
        vec![("monday".to_owned(), ObjectId(5)), ("tuesday".to_owned(), ObjectId(7))]
    }
}

pub(super) const SIZE_BYTES: u64 = 1 << 30;

pub(super) fn export(name: &str) -> ExportInfo {
    ExportInfo {
        name: name.to_owned(),
        description: format!("disk of {name}"),
        size_bytes: SIZE_BYTES,
        read_only: name.starts_with("ro"),
    }
}

/// A reply to an option.
pub(super) type OptionReply = (u32, Vec<u8>);

pub(super) struct Client {
    pub session: Session,
    pub exports: Vec<ExportInfo>,
    pub out: Effects<Effect>,
    /// Whether bytes leave at once.
    pub reads: bool,
    pub unread_bytes: usize,
    /// What the shell says to the next `Open`, if not yes.
    pub refusal: Option<Refusal>,
    pub opened: Vec<String>,
    pub requests: Vec<BlockRequest>,
    pub securing: bool,
    pub closed: bool,
}

impl Client {
    /// Connected and greeted, its flags not yet sent.
    pub(super) fn connect(config: SessionConfig, exports: &[&str]) -> Client {
        let mut out = Effects::new();
        let session = Session::new(config, &mut out);
        let mut client = Client {
            session,
            exports: exports.iter().map(|name| export(name)).collect(),
            out,
            reads: true,
            unread_bytes: 0,
            refusal: None,
            opened: Vec::new(),
            requests: Vec::new(),
            securing: false,
            closed: false,
        };
        assert_eq!(client.carry_out(), b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    /// Ready for options of the fixed newstyle.
    pub(super) fn new(config: SessionConfig, exports: &[&str]) -> Client {
        let mut client = Client::connect(config, exports);
        assert!(client.say(&3u32.to_be_bytes()).is_empty());
        client
    }

    /// Serving `name`, with structured replies and `base:allocation` or without.
    pub(super) fn serving(config: SessionConfig, name: &str, structured: bool) -> Client {
        let mut client = Client::new(config, &[name]);
        if structured {
            assert_eq!(client.option(8, b""), [(1, vec![])]);
            assert_eq!(client.option(10, &contexts(name, &["base:allocation"])).len(), 2);
        }
        assert_eq!(client.option(7, &info_data(name, &[])).last(), Some(&(1, vec![])));
        client
    }

    /// Carries out effects; returns what was sent to the client.
    pub(super) fn carry_out(&mut self) -> Vec<u8> {
        let mut sent = Vec::new();
        while !self.out.is_empty() {
            for effect in self.out.take() {
                assert!(!self.closed, "{effect:?} after the end");
                match effect {
                    Effect::Send(head) => sent.extend_from_slice(&head),
                    Effect::SendBuf(buf) => sent.extend_from_slice(&buf),
                    Effect::StartTls => self.securing = true,
                    Effect::Open { export } => {
                        let refusal = self.refusal.take();
                        let result = refusal.map_or_else(|| Ok(self.exports.find(&export).unwrap()), Err);
                        self.opened.push(export);
                        self.session.on_opened(result, &self.exports, &mut self.out);
                    }
                    Effect::Move { export: name } => {
                        self.exports.push(export(&name));
                        self.session.on_moved(&self.exports, &mut self.out);
                    }
                    Effect::Request(request) => self.requests.push(request),
                    Effect::Close => self.closed = true,
                }
            }
        }
        self.unread_bytes += sent.len();
        if self.reads {
            let count = std::mem::take(&mut self.unread_bytes);
            self.session.on_sent(count, &self.exports, &mut self.out);
            if !self.out.is_empty() {
                sent.extend(self.carry_out());
            }
        }
        sent
    }

    pub(super) fn say(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.session.on_bytes(bytes, &self.exports, &mut self.out);
        self.carry_out()
    }

    pub(super) fn option(&mut self, option: u32, data: &[u8]) -> Vec<OptionReply> {
        let sent = self.say(&option_bytes(option, data));
        parse_option_replies(&sent, option)
    }

    pub(super) fn request(&mut self, flags: u16, command: u16, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
        self.say(&request_bytes(flags, command, offset, len, payload))
    }

    /// The one operation that has reached the volume.
    pub(super) fn operation(&self) -> &BlockOp {
        let [request] = &self.requests[..] else { panic!("{} requests reached the volume", self.requests.len()) };
        &request.op
    }

    /// Answers the oldest request.
    pub(super) fn answer(&mut self, result: Result<BlockData, BlockError>) -> Vec<u8> {
        let token = self.requests.remove(0).token;
        self.session.on_reply(BlockReply { token, result }, &mut self.out);
        self.carry_out()
    }
}

pub(super) fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn parse_option_replies(mut bytes: &[u8], option: u32) -> Vec<OptionReply> {
    let mut replies = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<20>() {
        assert_eq!(head[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        assert_eq!(head[8..12], option.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        let (data, after) = rest.split_at(word(16) as usize);
        replies.push((word(12), data.to_vec()));
        bytes = after;
    }
    assert!(bytes.is_empty(), "{} bytes behind the last reply", bytes.len());
    replies
}

/// The cookie of every request here.
pub(super) const COOKIE: [u8; 8] = *b"\x01\x02\x03\x04\x05\x06\x07\x08";

pub(super) fn request_bytes(flags: u16, command: u16, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(COOKIE);
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

pub(super) fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

pub(super) fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| string(query)));
    data
}
