// Posts a body with Java's HttpClient over HTTP/2, and writes a line "VERSION STATUS BODY".
// Does so once for each token, over a new connection.
// Arguments: URL, a key store with the root (and a client's key pair, if any), its password, tokens.
import java.io.ByteArrayInputStream;
import java.io.FileInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.security.KeyStore;
import java.util.Arrays;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

public class Client {
    public static void main(String[] args) throws Exception {
        char[] password = args[2].toCharArray();
        KeyStore store = KeyStore.getInstance("PKCS12");
        try (FileInputStream file = new FileInputStream(args[1])) {
            store.load(file, password);
        }
        KeyManagerFactory keys = KeyManagerFactory.getInstance("PKIX");
        keys.init(store, password);
        TrustManagerFactory trusted = TrustManagerFactory.getInstance("PKIX");
        trusted.init(store);
        SSLContext tls = SSLContext.getInstance("TLS");
        tls.init(keys.getKeyManagers(), trusted.getTrustManagers(), null);
        byte[] body = System.in.readAllBytes();
        for (String token : Arrays.asList(args).subList(3, args.length)) {
            HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(args[0]))
                .POST(HttpRequest.BodyPublishers.ofInputStream(
                    () -> new ByteArrayInputStream(body)));
            if (!token.isEmpty()) request.header("Authorization", "Bearer " + token);
            HttpResponse<String> answer = HttpClient.newBuilder().sslContext(tls).build()
                .send(request.build(), HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body());
        }
    }
}
