//! Who may do what in a cluster, and which members it has: for a client that etcd takes for root.
//!
//! Role: the one place where users, roles and members are changed. All but what changes members may be done any number
//! of times.

use super::{EtcdStore, MetaError, Shared};
use etcd_client::{Client, Error, Permission, UserAddOptions};

const ROOT: &str = "root";

/// What a role may do, with keys as the store's callers know them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Right {
    /// Everything that the store holds.
    All,
    Read(&'static str),
    ReadUnder(&'static str),
}

/// A member as the cluster knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EtcdMember {
    pub id: u64,
    /// Empty until it was started for the first time.
    pub name: String,
    pub peer_urls: Vec<String>,
    pub client_urls: Vec<String>,
}

/// Done, also where it was so before.
fn so<T>(told: Result<T, Error>, already: &str) -> Result<(), Error> {
    match told {
        Err(Error::GRpcStatus(status)) if status.message().contains(already) => Ok(()),
        told => told.map(drop),
    }
}

/// `None` where there is no such user: several hosts, and commands, may be about it at once.
fn unless_gone<T>(told: Result<T, Error>) -> Result<Option<T>, Error> {
    match told {
        Err(Error::GRpcStatus(status)) if status.message().contains("user name not found") => Ok(None),
        told => told.map(Some),
    }
}

impl Shared {
    fn permission(&self, right: &Right) -> Permission {
        match right {
            Right::All => Permission::read_write(self.prefix.clone()).with_prefix(),
            Right::Read(key) => Permission::read(self.full_key(key)),
            Right::ReadUnder(prefix) => Permission::read(self.full_key(prefix)).with_prefix(),
        }
    }
}

/// A user without a password: who it is only a certificate shows.
async fn add_user(client: &mut Client, name: &str, role: &str) -> Result<(), Error> {
    let options = UserAddOptions::new().with_no_pwd();
    so(client.user_add(name, "", Some(options)).await, "already exists")?;
    client.user_grant_role(name, role).await.map(drop)
}

impl EtcdStore {
    /// Has the cluster let in only users that it knows, each to what their roles may do.
    pub fn protect(&self, roles: &[(&str, Vec<Right>)]) -> Result<(), MetaError> {
        self.0.read(|mut client| async move {
            so(client.role_add(ROOT).await, "already exists")?;
            add_user(&mut client, ROOT, ROOT).await
        })?;
        for (role, rights) in roles {
            let permissions: Vec<Permission> = rights.iter().map(|right| self.0.permission(right)).collect();
            self.0.read(|mut client| {
                let permissions = permissions.clone();
                async move {
                    so(client.role_add(*role).await, "already exists")?;
                    for permission in permissions {
                        client.role_grant_permission(*role, permission).await?;
                    }
                    Ok(())
                }
            })?;
        }
        self.0.read(|mut client| async move { client.auth_enable().await.map(drop) })
    }

    /// All users, and the roles of each. Who is deleted meanwhile is none.
    pub fn users(&self) -> Result<Vec<(String, Vec<String>)>, MetaError> {
        let listed = self.0.read(|mut client| async move { client.user_list().await })?;
        let roles = |name: &String| {
            let ask = |mut client: Client| async move { unless_gone(client.user_get(name.as_str()).await) };
            let told = self.0.read(ask).transpose()?;
            Some(told.map(|told| (name.clone(), told.roles().to_vec())))
        };
        listed.users().iter().filter_map(roles).collect()
    }

    pub fn add_user(&self, name: &str, role: &str) -> Result<(), MetaError> {
        self.0.read(|mut client| async move { add_user(&mut client, name, role).await })
    }

    /// From here on a user may do what the one role may, and what the other may not: also by connections that it has. Who
    /// is no user may do nothing anyway.
    pub fn change_role(&self, name: &str, from: &str, to: &str) -> Result<(), MetaError> {
        self.0.read(|mut client| async move {
            if unless_gone(client.user_grant_role(name, to).await)?.is_none() {
                return Ok(());
            }
            let revoked = unless_gone(client.user_revoke_role(name, from).await);
            so(revoked, "not granted")
        })
    }

    pub fn delete_user(&self, name: &str) -> Result<(), MetaError> {
        self.0.read(|mut client| async move { unless_gone(client.user_delete(name).await).map(drop) })
    }

    pub fn members(&self) -> Result<Vec<EtcdMember>, MetaError> {
        let told = self.0.read(|mut client| async move { client.member_list().await })?;
        let member = |m: &etcd_client::Member| EtcdMember {
            id: m.id(),
            name: m.name().to_string(),
            peer_urls: m.peer_urls().to_vec(),
            client_urls: m.client_urls().to_vec(),
        };
        Ok(told.members().iter().map(member).collect())
    }

    pub fn remove_member(&self, id: u64) -> Result<(), MetaError> {
        self.0.call(|mut client| async move { client.member_remove(id).await }).map(drop)
    }

    /// A member that is not there yet: the others wait for it at this address.
    pub fn add_member(&self, peer_url: &str) -> Result<(), MetaError> {
        self.0.call(|mut client| async move { client.member_add([peer_url], None).await }).map(drop)
    }
}
